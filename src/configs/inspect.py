"""The config of `inspect-data`: that of `sft`, so that its files and flags parse unchanged, and what is shown."""

import warnings

from pydantic import Field

from configs.checks import check_data, check_resume
from configs.errors import Fault
from configs.sft import SFTConfig

with warnings.catch_warnings():
    # pydantic's deprecated method `json` gives way to the flag that every tool has under this name.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class InspectConfig(SFTConfig):
        """What the model will see: rows as `sft` reads them, and counts. All tables of `sft`; [model] is optional."""

        rows: int = Field(default=3, ge=0)
        """Rows to show."""

        start: int | None = Field(default=None, ge=0)
        """Show the rows of an epoch from this one on."""

        epoch: int = Field(default=0, ge=0)
        """Epoch that rows and counts are of, counted from 0."""

        step: int | None = Field(default=None, ge=1)
        """Show the first rows of this optimizer step, counted as in metrics.jsonl: the first one is 1."""

        sample: int | None = Field(default=None, ge=0)
        """Show rows picked at random from the epoch; the number is the seed of the choice."""

        table: bool = False
        """Also list every token: position, id, text, label, loss."""

        json: bool = False
        """Print one JSON document and nothing else."""

        counts: bool = True
        """Count rows, tokens, loss tokens, padding, documents."""

        dropped: int = Field(default=0, ge=0)
        """Of data of type sft: list this many of the conversations that give no sample, each with its reason."""

        scan: bool = False
        """Count everything exactly, however much has to be read for it."""

        vocab_size: int | None = Field(default=None, ge=1)
        """Ids below this may occur. Unset: as [model.arch] has it, else the tokenizer's length."""

        def table_faults(self) -> list[Fault]:
            given = [name for name in ("start", "step", "sample") if getattr(self, name) is not None]
            if self.step is not None and self.epoch:
                given.append("epoch")
            if len(given) < 2:
                return []
            message = f"cannot be given together with {given[0]}: each of them says which rows to show"
            return [Fault(key=name, message=message) for name in given[1:]]

        def run_faults(self) -> list[Fault]:
            """Faults of the data alone: a run need not be possible yet, rows only have to be there."""
            faults = check_data(self.data)
            if self.step is not None:
                counts_on = self.ckpt is None or not self.ckpt.skip_progress
                faults += check_resume(
                    self.resume, self.run, clean=self.clean, max_steps=self.max_steps, counts_on=counts_on
                )
            return faults
