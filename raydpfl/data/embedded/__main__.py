import sys
from pathlib import Path

from raydpfl.data.embedded import build, path

build(Path(sys.argv[1]), path("train").parent)
