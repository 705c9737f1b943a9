"""Secure computation among a few parties: sums, three-party computation and threshold CKKS, with a test kit.

    from cloister import mpc

    run = mpc.simulate(my_protocol, params, {"basel": (x,), "lugano": (y,)}).check()
    mpc.check_lies(my_protocol, [mpc.Case(params, inputs)], right=right)

Nothing here knows cells, studies or command lines. A protocol is a module with `Params`, messages and coroutines, one
per role; docs/mpc.md writes one, attacks it and runs it between processes. A name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cloister.errors import CloisterError, ParameterError, ProtocolAbort, WireError

if TYPE_CHECKING:
    from cloister.mpc.crypto.agreement import Identity as Identity
    from cloister.mpc.crypto.entropy import Entropy as Entropy
    from cloister.mpc.crypto.fixed_point import FixedPoint as FixedPoint
    from cloister.mpc.crypto.replicated import Ring as Ring
    from cloister.mpc.crypto.replicated import Shared as Shared
    from cloister.mpc.net.channel import Channel as Channel
    from cloister.mpc.net.channel import Link as Link
    from cloister.mpc.net.events import Event as Event
    from cloister.mpc.net.mailbox import Mailbox as Mailbox
    from cloister.mpc.net.memory_transport import Fault as Fault
    from cloister.mpc.net.pipe_transport import PipeLink as PipeLink
    from cloister.mpc.net.pipe_transport import carry as carry
    from cloister.mpc.net.receipts import Receipt as Receipt
    from cloister.mpc.net.wire import message as message
    from cloister.mpc.parties import Agreement as Agreement
    from cloister.mpc.parties import Party as Party
    from cloister.mpc.parties import Role as Role
    from cloister.mpc.session import Context as Context
    from cloister.mpc.session import Session as Session
    from cloister.mpc.session import open_session as open_session
    from cloister.mpc.simulation import Simulation as Simulation
    from cloister.mpc.simulation import simulate as simulate
    from cloister.mpc.sums import checked_sum as checked_sum
    from cloister.mpc.sums import common_seed as common_seed
    from cloister.mpc.sums import consistency_check as consistency_check
    from cloister.mpc.sums import count_tests as count_tests
    from cloister.mpc.sums import pooled_quantiles as pooled_quantiles
    from cloister.mpc.sums import pooled_scaling as pooled_scaling
    from cloister.mpc.sums import retry_without_dropouts as retry_without_dropouts
    from cloister.mpc.sums import secure_sum as secure_sum
    from cloister.mpc.testing import Case as Case
    from cloister.mpc.testing import Lie as Lie
    from cloister.mpc.testing import Lies as Lies
    from cloister.mpc.testing import check_abort as check_abort
    from cloister.mpc.testing import check_cost as check_cost
    from cloister.mpc.testing import check_ideal as check_ideal
    from cloister.mpc.testing import check_lies as check_lies
    from cloister.mpc.testing import check_protocol as check_protocol
    from cloister.mpc.testing import check_vectors as check_vectors
    from cloister.mpc.testing import check_view as check_view
    from cloister.mpc.testing import run_protocol as run_protocol
    from cloister.mpc.three_party.verified import Verified as Verified
    from cloister.mpc.three_party.verified import XorShares as XorShares
    from cloister.mpc.threshold_ckks import collective_audit as collective_audit
    from cloister.mpc.threshold_ckks import collective_key as collective_key
    from cloister.mpc.threshold_ckks import collective_refresh as collective_refresh
    from cloister.mpc.threshold_ckks import collective_relin as collective_relin
    from cloister.mpc.threshold_ckks import collective_rotation as collective_rotation
    from cloister.mpc.threshold_ckks import key_switch as key_switch
    from cloister.mpc.threshold_ckks import threshold_decrypt as threshold_decrypt

    ThreeParty = Verified

_NAMES = {
    "parties": ("Agreement", "Party", "Role"),
    "session": ("Context", "Session", "open_session"),
    "simulation": ("Simulation", "simulate"),
    "net.channel": ("Channel", "Link"),
    "net.mailbox": ("Mailbox",),
    "net.wire": ("message",),
    "net.receipts": ("Receipt",),
    "net.events": ("Event",),
    "net.memory_transport": ("Fault",),
    "net.pipe_transport": ("PipeLink", "carry"),
    "crypto.entropy": ("Entropy",),
    "crypto.agreement": ("Identity",),
    "crypto.fixed_point": ("FixedPoint",),
    "crypto.replicated": ("Ring", "Shared"),
    "three_party.verified": ("XorShares",),
    "testing": (
        "Case",
        "Lie",
        "Lies",
        "check_abort",
        "check_cost",
        "check_ideal",
        "check_lies",
        "check_protocol",
        "check_vectors",
        "check_view",
        "run_protocol",
    ),
}
_MODULES = {
    "sums": (
        "checked_sum",
        "common_seed",
        "consistency_check",
        "count_tests",
        "pooled_quantiles",
        "pooled_scaling",
        "retry_without_dropouts",
        "secure_sum",
    ),
    "threshold_ckks": (
        "collective_audit",
        "collective_key",
        "collective_refresh",
        "collective_relin",
        "collective_rotation",
        "key_switch",
        "threshold_decrypt",
    ),
}
_WHERE = {name: (module, name) for module, names in _NAMES.items() for name in names}
_WHERE["ThreeParty"] = ("three_party.verified", "Verified")
_WHERE |= {name: (f"{package}.{name}", "") for package, names in _MODULES.items() for name in names}

__all__ = ["CloisterError", "ParameterError", "ProtocolAbort", "WireError", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'cloister.mpc' has no attribute '{name}'")
    module, attribute = _WHERE[name]
    found = importlib.import_module(f"cloister.mpc.{module}")
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted(__all__)
