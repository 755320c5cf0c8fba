"""`oapl report`: one HTML file that needs no network, from run folders or from a study's folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from oapl.config import load_recipe
from oapl.errors import ConfigError
from oapl.report.completions import MAX_BYTES, MAX_GROUPS, Scorer, completions
from oapl.report.figures import charts_for
from oapl.report.runs import names_of, open_runs, run_record
from oapl.report.study import is_study, study_record
from oapl.store.files import write_bytes

ASSETS = Path(__file__).parent.parent / "assets" / "report"


def write_report(
    paths: Sequence[Path], output: Path | None, scorer: Scorer | None, max_groups: int = MAX_GROUPS
) -> Path:
    """Writes the page and returns where. Raises ConfigError where a path is neither a run nor a study."""
    if any(is_study(path) for path in paths):
        if len(paths) > 1:
            raise ConfigError(
                f"{next(path for path in paths if is_study(path))} is a study folder, which has a report of its own. "
                f"Give it alone, or name run folders only."
            )
        data = study_data(paths[0])
    else:
        data = runs_data(paths, scorer, max_groups)
    target = output or default_output(paths)
    write_bytes(target, render(data, get_plotlyjs()))
    return target


def default_output(paths: Sequence[Path]) -> Path:
    """In the folder of the one run or study, else where the command runs."""
    return paths[0] / "report.html" if len(paths) == 1 else Path("report.html")


def runs_data(paths: Sequence[Path], scorer: Scorer | None, max_groups: int) -> dict[str, Any]:
    names = names_of(paths)
    records = []
    for run, name in zip(open_runs(paths), names, strict=True):
        recipe = load_recipe(run.config_path)
        metrics = run.metrics()
        record = run_record(run, recipe, name, metrics)
        last_step = metrics[-1]["step"] if metrics else None
        shown, notes = completions(run, recipe, last_step, scorer, max_groups, MAX_BYTES // len(paths))
        records.append({**record, "completions": shown, "completion_notes": notes})
    drawn = {name for record in records for name in record["columns"]}
    return {**about("runs", ", ".join(names)), "charts": charts_for(drawn), "runs": records}


def study_data(path: Path) -> dict[str, Any]:
    study = study_record(path)
    metrics = {name for curve in study["curves"] for name in curve["columns"]}
    return {**about("study", study["name"]), "charts": charts_for(metrics), "study": study}


def about(kind: str, title: str) -> dict[str, str]:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"kind": kind, "title": title, "made": made, "version": version("oapl")}


def render(data: Mapping[str, Any], plotly: str) -> bytes:
    """The page. Its scripts carry a nonce made of the data, and no other script may run, nor anything be fetched."""
    text = script_json(data)
    parts = {
        "data": text,
        "plotly": plotly,
        "nonce": hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32],
        **{path.name: path.read_text(encoding="utf-8") for path in ASSETS.iterdir() if path.suffix in (".css", ".js")},
    }
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{([\w.]+)\}\}", lambda match: parts[match[1]], template)
    return page.encode("utf-8", "backslashreplace")


def script_json(value: Any) -> str:
    """JSON that may stand in a script element whatever its strings hold: nothing in it can end the element."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def finite(value: Any) -> Any:
    """The same value with None for each number that is not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
