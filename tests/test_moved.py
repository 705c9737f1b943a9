"""Old module names are the new modules, with a warning; what is not ours is left alone."""

import importlib
import subprocess
import sys

import pytest

from cloister import _moved


@pytest.mark.parametrize("old", sorted({**_moved.MODULES, **_moved.PACKAGES}))
def test_an_old_name_is_the_new_module_and_warns(old):
    new = importlib.import_module(_moved.new_name(f"cloister.{old}"))
    sys.modules.pop(f"cloister.{old}", None)
    with pytest.warns(DeprecationWarning, match="is now cloister"):
        assert importlib.import_module(f"cloister.{old}") is new
    assert new.__spec__.name == new.__name__ != f"cloister.{old}"


def test_a_module_in_an_old_package_is_found_and_its_state_is_one():
    for name in [n for n in sys.modules if n.startswith("cloister.protocols.")]:
        del sys.modules[name]
    with pytest.warns(DeprecationWarning, match="is now cloister.mpc.sums"):
        from cloister.protocols.sums.secure_sum import Params
    from cloister.mpc.sums import secure_sum

    assert Params is secure_sum.Params


@pytest.mark.filterwarnings("ignore:cloister.crypto is now:DeprecationWarning")
def test_a_name_that_never_was_stays_unknown():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cloister.crypto.no_such")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cloister.no_such")


def test_programs_that_units_of_systemd_call_by_their_old_names_start():
    command = [sys.executable, "-W", "ignore", "-m", "cloister.runtime.provision", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "identity" in done.stdout
