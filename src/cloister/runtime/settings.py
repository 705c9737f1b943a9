"""FLARE's local settings at a party, written by the party's own installation before every start.

No kit can loosen them, and nobody has to know them: no code from outside, two classes that a job may name, nothing an
administrator may do at a party but start and stop runs, no logs to the coordinator, storage inside the kit.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from cloister.errors import ParameterError
from cloister.runtime.kit import RUNS, Kit

HUB, GUEST, LAUNCHER = (f"cloister.runtime.flare.{name}" for name in ("Hub", "Guest", "Launcher"))
RUN_FOLDER = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # FLARE calls a run's folder by its id
BEAT, DEAD_AFTER = 10.0, 30  # seconds between a client's signs of life; after which the server forgets it


def settle(kit: Kit) -> None:
    """Write FLARE's local settings as this installation wants them."""
    hub, local = kit.role == "coordinator", kit.path / "local"
    rights = ("clone_job", "download_job", "operate", "shell_commands", "byoc", "server-predeployed-flwr")
    lead = {"submit_job": "any", "manage_job": "n:submitter", "view": "any", **dict.fromkeys(rights, "none")}
    write(local / "authorization.json", {"format_version": "1.0", "permissions": {"lead": lead}})
    write(local / "resources.json", _server_resources(kit.path) if hub else _client_resources())
    write(local / "log_config.json", _logging())
    if hub:
        file = kit.path / "startup" / "fed_server.json"
        config = json.loads(file.read_text())
        host, port = (kit.study.network.get(k) for k in ("host", "port"))
        if not host or not port:
            raise ParameterError("study.toml: [network] must name host and port of the coordinator")
        config["servers"][0]["service"]["target"] = f"{host}:{port}"  # a loopback name: listen there only
        config["servers"][0]["admin_port"] = port
        write(file, config)
        (kit.path / RUNS).mkdir(exist_ok=True)


def tidy(home: Path, *, most: int = 5_000_000, old: int = 5, runs: int = 20) -> None:
    """Keep a kit from growing: rotate the logs that FLARE only appends to, and drop its folders of older runs.

    `log.txt` rotates by itself while the service runs. What came of a run is under `results` and is never touched.
    """
    for name in ("audit.log", "service.out", "log_error.txt", "log_fl.txt", "log.json"):
        if not (home / name).is_file() or (home / name).stat().st_size < most:
            continue
        for i in range(old - 1, 0, -1):
            if (home / f"{name}.{i}").exists():
                (home / f"{name}.{i}").replace(home / f"{name}.{i + 1}")
        (home / name).replace(home / f"{name}.1")
    folders = [p for p in home.iterdir() if p.is_dir() and not p.is_symlink() and RUN_FOLDER.fullmatch(p.name)]
    for folder in sorted(folders, key=lambda p: p.stat().st_mtime)[: max(0, len(folders) - runs)]:
        shutil.rmtree(folder, ignore_errors=True)


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _component(name: str, path: str, **args: Any) -> dict[str, Any]:
    return {"id": name, "path": f"nvflare.{path}", "args": args}


def _allowed() -> dict[str, Any]:
    return {"format_version": 2, "class_list_enforcement_mode": "enforce", "class_allow_list": [HUB, GUEST]}


def _client_resources() -> dict[str, Any]:
    managers, consumers = "app_common.resource_managers", "app_common.resource_consumers"
    return {
        **_allowed(),
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30},
        "components": [
            _component(
                "resource_manager",
                f"{managers}.gpu_resource_manager.GPUResourceManager",
                num_of_gpus=0,
                mem_per_gpu_in_GiB=0,
            ),
            _component("resource_consumer", f"{consumers}.gpu_resource_consumer.GPUResourceConsumer"),
            {"id": "process_launcher", "path": LAUNCHER, "args": {}},
        ],
    }


def _server_resources(home: Path) -> dict[str, Any]:
    storage = "app_common.storages.filesystem_storage.FilesystemStorage"
    return {
        **_allowed(),
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 100,
                "heart_beat_timeout": DEAD_AFTER,
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {
                    "path": f"nvflare.{storage}",
                    "args": {"root_dir": str(home / "snapshots"), "uri_root": "/"},
                },
            },
        },
        "components": [
            _component(
                "job_scheduler",
                "app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                max_jobs=4,
                max_schedule_count=1,
            ),
            _component(
                "job_manager",
                "apis.impl.job_def_manager.SimpleJobDefManager",
                uri_root=str(home / "jobs"),
                job_store_id="job_store",
            ),
            _component("job_store", storage),
            _component("process_launcher", "app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher"),
        ],
    }


class Brief(logging.Filter):
    """What the console shows: our own lines, and that FLARE is connected."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.startswith("cloister") or "uccessfully registered client" in str(record.msg)


def _logging() -> dict[str, Any]:
    """Everything into one rotating file; on the console, what the owner wants to know."""
    utilities = "nvflare.fuel.utils.log_utils"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "file": {
                "()": f"{utilities}.BaseFormatter",
                "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s",
            },
            "console": {"format": "%(asctime)s %(message)s", "datefmt": "%H:%M:%S"},
        },
        "filters": {"brief": {"()": f"{__name__}.Brief"}},
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "level": "INFO",
                "formatter": "console",
                "filters": ["brief"],
                "stream": "ext://sys.stderr",
            },
            "file": {
                "class": "logging.handlers.RotatingFileHandler",
                "level": "INFO",
                "formatter": "file",
                "filename": "log.txt",
                "mode": "a",
                "maxBytes": 5_000_000,
                "backupCount": 5,
            },
        },
        "loggers": {"root": {"level": "INFO", "handlers": ["console", "file"]}},
    }
