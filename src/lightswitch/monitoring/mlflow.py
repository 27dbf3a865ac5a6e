"""Runs as runs of MLflow."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only


class MLflowRun(MLFlowLogger):
    """Logger to MLflow that continues the experiment's run of the same name, where Lightning's would start another.

    Args:
        experiment_name: created if there is none.
        run_name: which is looked for.
        tracking_uri: of the store; `sqlite:///…` for a local file.
        tags: words, each of which becomes a tag of the run with the value true: `tags.baseline = 'true'` finds them.
        options: of Lightning's MLFlowLogger.

    Raises:
        ModuleNotFoundError: MLflow, or what its SQLite store needs, is not installed.
    """

    def __init__(
        self, experiment_name: str, run_name: str, tracking_uri: str, tags: Sequence[str] = (), **options: Any
    ) -> None:
        needed = ["mlflow", *(["sqlalchemy", "alembic"] if tracking_uri.startswith("sqlite:") else [])]
        if missing := [name for name in needed if find_spec(name) is None]:
            raise ModuleNotFoundError(
                f"logger=mlflow needs {', '.join(needed)}; not installed: {', '.join(missing)}; "
                "type: pip install -e '.[mlflow]'"
            )
        super().__init__(experiment_name, run_name, tracking_uri, tags=dict.fromkeys(tags, "true"), **options)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if not self._initialized and self._run_id is None:
            self._run_id = self._earlier_run_id()
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log those that the run does not have yet: MLflow refuses another value, as a resumed run may have."""
        known = self.experiment.get_run(self.run_id).data.params
        super().log_hyperparams({name: value for name, value in _flat(params) if name not in known})

    def _earlier_run_id(self) -> str | None:
        experiment = self._mlflow_client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            return None
        runs = self._mlflow_client.search_runs(
            [experiment.experiment_id], f"attributes.run_name = '{self._run_name}'", max_results=1
        )
        if not runs:
            return None
        run_id = str(runs[0].info.run_id)
        self._mlflow_client.update_run(run_id, status="RUNNING")
        return run_id


def _flat(params: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values by the names that Lightning's logger gives them."""
    for name, value in (vars(params) if isinstance(params, Namespace) else params).items():
        if isinstance(value, dict | Namespace):
            yield from _flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value
