from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The bench is run from the repository and not installed.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
