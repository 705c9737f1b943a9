"""How openings of a key share were counted before N5: read when keys are loaded, written when they are spent."""

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks.parameters import OPENINGS


class OldKeys:
    def __init__(self, path):
        self.path = path
        self.openings = int(path.read_text()) if path.exists() else 0

    def spend(self, openings):
        if self.openings + openings > OPENINGS:
            raise ParameterError("too many openings")
        self.openings += openings
        self.path.write_text(str(self.openings))
