"""The rule of ``choice.py`` where the logits are: the Triton kernels, fed from the sampling table."""

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from nanoserve.model.adjustments import SampleBatch
from nanoserve.model.kernels.triton.choose import SettingsTable, choose_tokens
from nanoserve.model.sampling_table import IntArray, SamplingTable


class DeviceChoice:
    """Tokens of a batch from its logits [num_rows, vocab_size], in any float dtype, on their own device."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table

    def __call__(self, logits: Tensor, batch: SampleBatch) -> IntArray:
        device = logits.device
        columns = {field.name: getattr(self._table, field.name)[batch.rows] for field in fields(SettingsTable)}
        columns["seed"] = columns["seed"].view(np.int64)
        settings = SettingsTable(**{name: torch.from_numpy(column).to(device) for name, column in columns.items()})
        entries = torch.arange(len(logits), device=device)
        positions = torch.from_numpy(batch.positions).to(device)
        return choose_tokens(logits, entries, positions, settings).cpu().numpy()
