"""The commands that read finished or running runs: `compare-runs` and `plot-runs`."""

import warnings
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from configs.base import BaseConfig
from configs.errors import Fault
from configs.launch import RUN_CONFIG

_SHOWN_RUNS = 5


class PlotConfig(BaseConfig):
    """Curves of one or several runs as one HTML page that opens without a network."""

    positional: ClassVar[str | None] = "runs"

    runs: list[Path] = Field(min_length=1)
    """Run directories; each gets one colour in all plots."""

    output: Path = Path("report.html")
    """The page. It replaces an older one."""

    watch: bool = False
    """Write the page anew while the runs go on; it shows the new state by itself. Ends with the runs, or on Ctrl-C."""

    interval: float = Field(default=5, gt=0, le=3600)
    """Seconds from one writing of the page to the next."""

    def table_faults(self) -> list[Fault]:
        if self.output.suffix.lower() not in (".html", ".htm"):
            message = f"{self.output} would be replaced by a page: give it a name that ends in .html"
            return [Fault(key="output", message=message)]
        return []

    def run_faults(self) -> list[Fault]:
        faults = run_folder_faults(self.runs)
        if self.output.is_dir():
            faults.append(Fault(key="output", message=f"{self.output} is a folder"))
        elif not self.output.parent.is_dir():
            faults.append(Fault(key="output", message=f"there is no folder {self.output.parent} to write the page to"))
        return faults


with warnings.catch_warnings():
    # `json` is also a method of pydantic's models, one that it has retired; the flag's name is worth more.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class CompareConfig(BaseConfig):
        """Where two runs differ first, and in what. Exit code 0: equal in all that was compared; 1: they differ."""

        positional: ClassVar[str | None] = "runs"

        runs: list[Path] = Field(min_length=1)
        """Two run directories."""

        rtol: float = Field(default=0, ge=0, lt=1)
        """Numbers count as equal up to this part of the larger one. Above 0, checksums of parameters are shown only."""

        config: bool = True
        """Compare the configs too. `--no-config`: other settings alone are no difference."""

        json: bool = False
        """Print one JSON object in place of text."""

        def table_faults(self) -> list[Fault]:
            if len(self.runs) == 2:
                return []
            return [Fault(key="runs", message=f"needs two run directories, got {len(self.runs)}")]

        def run_faults(self) -> list[Fault]:
            return run_folder_faults(self.runs)


def run_folder_faults(runs: list[Path]) -> list[Fault]:
    """What is wrong with run directories that shall be read."""
    faults = [Fault(key="runs", message=message) for run in runs if (message := _folder_fault(run)) is not None]
    places = [run.resolve() for run in runs]
    for place in sorted({place for place in places if places.count(place) > 1}):
        faults.append(Fault(key="runs", message=f"{place} is given twice"))
    return faults


def _folder_fault(run: Path) -> str | None:
    if not run.exists():
        return f"there is no folder {run}"
    if not run.is_dir():
        return f"{run} is a file: give the run directory, the folder with {RUN_CONFIG} and metrics.jsonl"
    if (run / RUN_CONFIG).is_file():
        return None
    inner = sorted(path.parents[1] for path in run.glob(f"*/{RUN_CONFIG}"))
    if inner:
        names = ", ".join(map(str, inner[:_SHOWN_RUNS])) + (", ..." if len(inner) > _SHOWN_RUNS else "")
        return f"{run} is no run directory but holds some: {names}"
    return f"{run} is no run directory: it holds no {RUN_CONFIG}"
