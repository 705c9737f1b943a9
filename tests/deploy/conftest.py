"""Puts the test consortium and its workflow `chat` on the path, as the services have it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "chat")]
