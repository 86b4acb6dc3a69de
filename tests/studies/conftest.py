"""The scripts of `studies/` are imported by their names, as they import each other."""

from __future__ import annotations

import sys
from pathlib import Path

STUDIES = Path(__file__).resolve().parents[2] / "studies"
sys.path.append(str(STUDIES))
