"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from oapl.config import TrackingConfig
from oapl.errors import ConfigError
from oapl.store import RunFolder


class Tracker(Protocol):
    def log(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    def __init__(self, run: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.local_path / "tensorboard"))

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class ModuleTracker:
    """wandb and trackio, whose modules share `init`, `log` and `finish`."""

    def __init__(self, module: Any, project: str, run: RunFolder, config: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project=project, name=run.path.name, config=dict(config))

    def log(self, record: Mapping[str, Any]) -> None:
        self._module.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def close(self) -> None:
        self._module.finish()


def make_trackers(tracking: TrackingConfig, run: RunFolder, config: Mapping[str, Any]) -> list[Tracker]:
    """Raises ConfigError where one is asked for that is not installed."""
    trackers: list[Tracker] = []
    for name in tracking.report_to:
        try:
            if name == "tensorboard":
                trackers.append(TensorBoardTracker(run))
            else:
                trackers.append(ModuleTracker(__import__(name), tracking.project, run, config))
        except ImportError as error:
            raise ConfigError(
                f"tracking.report_to names {name!r}, which is not installed: pip install 'oapl[{name}]'. ({error})"
            ) from error
    return trackers
