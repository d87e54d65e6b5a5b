"""Makes the helpers of the emulated device's tests importable: both devices are held to the same faults."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "emulated"))
