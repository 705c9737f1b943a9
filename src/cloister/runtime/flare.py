"""Cloister on NVIDIA FLARE: the only module that FLARE loads, inside the processes it starts for a run.

A job of ours is a bell. It holds no code, no data and no parameters; it names the two classes below, which every party
has installed and its kit's allow-list admits. `Hub` is the coordinator's process, `Guest` any other party's; each opens
its own kit and takes its turn (`cloister.runtime.party`).

Frames go from process to process as plain requests of FLARE's cells, through the coordinator's server
(benchmarks/flare_link.py has the round trips); a request to a dead process fails at once instead of waiting for a
timeout.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply as make_answer
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.message import Message

from cloister.errors import CloisterError
from cloister.runtime.kit import RUNS, STOPPING, TASK, Kit
from cloister.runtime.link import PING, Absent, Unreachable
from cloister.runtime.party import Ended, Turn, log, lost
from cloister.study import Party

CHANNEL, TOPIC = "cloister", "frame"
NOBODY = (CellCode.TARGET_UNREACHABLE, CellCode.COMM_ERROR)
WORD = "word"  # key of a reply: how it ended there


class Cells:
    """Requests between the processes of one job; the server's cell relays them."""

    def __init__(self, fl_ctx: FLContext, kit: Kit) -> None:
        self._core = fl_ctx.get_engine().get_cell().core_cell
        job, hub = fl_ctx.get_job_id(), kit.study.coordinator
        self._names = {p: FQCN.join([FQCN.ROOT_SERVER if p == hub else p, job]) for p in kit.study.parties}
        self._parties = {name: p for p, name in self._names.items()}

    def ask(self, to: Party, request: bytes, seconds: float) -> bytes:
        reply = self._send(self._names[to], request, seconds)
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        if code == CellCode.OK:
            return bytes(reply.payload)
        if code == CellCode.TIMEOUT:
            raise TimeoutError
        service = self._send(FQCN.get_parent(self._names[to]), PING, seconds)
        raise Absent if service.get_header(MessageHeaderKey.RETURN_CODE) in NOBODY else Unreachable

    def _send(self, target: str, request: bytes, seconds: float) -> Message:
        return self._core.send_request(
            channel=CHANNEL,
            topic=TOPIC,
            target=target,
            request=new_cell_message({}, request),
            timeout=seconds,
            optional=True,
        )

    def serve(self, turn: Turn) -> None:
        """Hand requests to the link, with the sender that FLARE's server vouches for."""

        def answer(request: Message) -> Message:
            sender = self._parties.get(request.get_header(MessageHeaderKey.ORIGIN))
            if sender is None or not isinstance(request.payload, bytes | bytearray | memoryview):
                return make_answer(CellCode.INVALID_REQUEST)
            try:
                return make_answer(CellCode.OK, body=turn.link.answer(sender, bytes(request.payload)))
            except Exception as e:
                log.error("a frame of '%s' could not be taken in (%s)", sender, type(e).__name__)
                return make_answer(CellCode.PROCESS_EXCEPTION)

        self._core.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=answer)


def _watch(turn: Turn, abort: Signal) -> None:
    """End the turn when FLARE stops the job, or when this party's own service stops or is gone."""
    parent, stopping = os.getppid(), turn.kit.path / STOPPING

    def look() -> None:
        while not abort.triggered and os.getppid() == parent and not stopping.exists():
            time.sleep(0.5)
        if abort.triggered:
            turn.link.stop("the run was stopped")
        else:
            turn.link.stop("this party's service was stopped")
            turn.over.wait(5.0)
            os._exit(0)

    threading.Thread(target=look, name="watch", daemon=True).start()


def _open_turn(fl_ctx: FLContext, abort: Signal) -> tuple[Turn, Cells]:
    kit = Kit.open(Path(fl_ctx.get_workspace().get_root_dir()))
    cells = Cells(fl_ctx, kit)
    turn = Turn(kit, fl_ctx.get_job_id(), cells.ask)
    cells.serve(turn)
    _watch(turn, abort)
    return turn, cells


class Launcher(ClientProcessJobLauncher):
    """Starts a run's process at a guest.

    FLARE stops a whole job when one party's process dies. Whether the others can go on is for the protocol to say, so
    the death of a process is no news here; the links find out.
    """

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        return _Handle(process_adapter=super().launch_job(job_meta, fl_ctx).adapter)


class _Handle(ProcessHandle):
    def poll(self) -> str:
        code = super().poll()
        return code if code == JobReturnCode.UNKNOWN else JobReturnCode.SUCCESS


class Guest(Executor):
    """A site or an auxiliary."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        reply = make_reply(ReturnCode.OK)
        try:
            turn, _ = _open_turn(fl_ctx, abort_signal)
            reply[WORD] = turn.take().word
        except CloisterError as e:  # the kit itself is broken
            log.error("run %s: %s", fl_ctx.get_job_id()[:8], e)
            reply[WORD] = f"aborted kit - {type(e).__name__}"
        return reply


class Hub(Controller):
    """The coordinator: rings for the others, takes its own turn, and waits until everyone has ended."""

    def start_controller(self, fl_ctx: FLContext) -> None: ...

    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def process_result_of_unknown_task(self, *_: object) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        job = fl_ctx.get_job_id()
        file = Path(fl_ctx.get_workspace().get_root_dir()) / RUNS / f"{job}.json"
        try:
            turn, cells = _open_turn(fl_ctx, abort_signal)
        except CloisterError as e:
            lost("", job, str(e)).save(file)
            return
        words: dict[str, str] = {}

        def heard(client_task: ClientTask, fl_ctx: FLContext) -> None:
            party = client_task.client.name
            words[party] = str(client_task.result.get(WORD, "aborted"))
            if words[party] != "done":
                turn.mailbox.gone(Party(party), "it stopped")

        guests = [p for p in turn.kit.study.parties if p != turn.kit.me]
        task = Task(name=TASK, data=Shareable(), result_received_cb=heard)
        self.broadcast(task=task, fl_ctx=fl_ctx, targets=guests, min_responses=len(guests))
        mine: list[Ended] = []
        own = threading.Thread(target=lambda: mine.append(turn.take()), name="turn", daemon=True)
        own.start()
        while own.is_alive():
            own.join(0.5)
        self._see_off(turn, cells, guests, words, abort_signal)
        ended = Ended(**{**vars(mine[0]), "parties": {p: words.get(p, "lost") for p in guests}})
        ended.save(file)

    def _see_off(self, turn: Turn, cells: Cells, guests: list[Party], words: dict[str, str], abort: Signal) -> None:
        """Wait until every guest has ended, or has been out of reach for a while."""
        seen = {p: float("-inf") if turn.link.lost(p) else time.monotonic() for p in guests}
        end = time.monotonic() + turn.kit.study.patience
        while not abort.triggered and time.monotonic() < end:
            waiting = [p for p in guests if p not in words and time.monotonic() - seen[p] < turn.link.away]
            if not waiting:
                return
            for p in waiting:
                with contextlib.suppress(Unreachable, TimeoutError):
                    cells.ask(p, PING, 2.0)
                    seen[p] = time.monotonic()
            time.sleep(0.5)
