"""The test kit: six questions to every protocol, and what a malicious party may do.

See `checks` for the questions and `lies` for the malicious party.
"""

from __future__ import annotations

from cloister.mpc.net.memory_transport import Fault, Killed
from cloister.mpc.testing.checks import (
    FRAMING,
    Case,
    Lies,
    check_abort,
    check_cost,
    check_ideal,
    check_lies,
    check_no_errors,
    check_protocol,
    check_vectors,
    check_view,
    dealt_seeds,
    fixed_entropy,
    name_of,
    plain_inputs,
    run_protocol,
    same_array,
    transcript,
    values,
    with_other_inputs,
)
from cloister.mpc.testing.lies import LETTERS, Lie

__all__ = [
    "FRAMING",
    "LETTERS",
    "Case",
    "Fault",
    "Killed",
    "Lie",
    "Lies",
    "check_abort",
    "check_cost",
    "check_ideal",
    "check_lies",
    "check_no_errors",
    "check_protocol",
    "check_vectors",
    "check_view",
    "dealt_seeds",
    "fixed_entropy",
    "name_of",
    "plain_inputs",
    "run_protocol",
    "same_array",
    "transcript",
    "values",
    "with_other_inputs",
]
