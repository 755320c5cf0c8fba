"""A Chromium without a window, for measurements, pictures and tests."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """What to install, or None where all is there."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return "no chromium and chromedriver here: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium here: pip install selenium"
    return None


def open_chromium() -> Any:
    """Its driver, which keeps what the console and the network say. `missing` must be None."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for option in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def set_window(driver: Any, width: int, height: int, mobile: bool = False) -> None:
    """Sizes in CSS pixels."""
    sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)


def take_picture(driver: Any, path: Path, whole: bool = True) -> None:
    """Of the whole page, or of what the window shows."""
    options: dict[str, Any] = {}
    if whole:
        width, height = driver.execute_script("return [window.innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        options = {"captureBeyondViewport": True, "clip": clip}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(shot["data"]))
