"""A program in the carrier's place that tries everything, and tells its party what came of each try."""

import ctypes
import json
import os
import socket
import threading
from pathlib import Path

from cloister.deploy.pipe import LOG, Packet

LIBC = ctypes.CDLL(None, use_errno=True)


def system_call(number, *args):
    result = LIBC.syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def connect(address, kind=socket.SOCK_STREAM, family=socket.AF_INET, protocol=0):
    with socket.socket(family, kind, protocol) as s:
        s.settimeout(2.0)
        s.connect(address)
        return "connected"


def fast_open(port):
    """Data with the first packet: connects without calling connect."""
    with socket.socket() as s:
        s.settimeout(2.0)
        return s.sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", port))


def listen():
    with socket.socket() as s:
        s.listen()  # without bind, the kernel chooses a port
        return s.getsockname()[1]


def start(how):
    pid = how()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def peek(pid):
    """Read eight bytes of another process."""
    buffer = ctypes.create_string_buffer(8)

    class Iovec(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    here = Iovec(ctypes.cast(buffer, ctypes.c_void_p), 8)
    with open(f"/proc/{pid}/maps") as f:
        at = int(f.readline().split("-")[0], 16)
    there = Iovec(at, 8)
    return system_call(310, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)


def tries(plan):
    """What to try; `plan["goods"]` says what there is to be stolen."""
    goods = plan["goods"]
    party, other = os.getppid(), goods["other_port"]
    made = {f"read {path}": lambda path=path: len(Path(path).read_bytes()) for path in goods["files"]}
    made |= {f"list {path}": lambda path=path: os.listdir(path) for path in goods["folders"]}
    return made | {
        "delete the results": lambda: os.unlink(goods["result"]),
        "rename the results": lambda: os.rename(goods["result"], goods["result"] + "x"),
        "write beside the key": lambda: open(goods["new"], "w").close(),
        "connect to another port": lambda: connect(("127.0.0.1", other)),
        "connect by its first packet": lambda: fast_open(other),
        "connect by MPTCP": lambda: connect(("127.0.0.1", other), protocol=262),
        "connect by IPv6": lambda: connect(("::1", other), family=socket.AF_INET6),
        "send a datagram": lambda: connect(("127.0.0.1", 53), socket.SOCK_DGRAM),
        "connect to a Unix socket": lambda: connect(goods["unix"], family=socket.AF_UNIX),
        "connect to an abstract socket": lambda: connect("\0" + goods["abstract"], family=socket.AF_UNIX),
        "open a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
        "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
        "listen": listen,
        "execute a program": lambda: start(lambda: os.posix_spawn("/bin/true", ["true"], {})),
        "fork": lambda: start(os.fork),
        "vfork": lambda: start(lambda: system_call(57)),
        "make a file of memory": lambda: os.memfd_create("x"),
        "trace the party": lambda: system_call(101, 0x4206, party, 0, 0),
        "read the party's memory": lambda: peek(party),
        "open the party's memory": lambda: open(f"/proc/{party}/mem", "rb").close(),
        "read the party's environment": lambda: open(f"/proc/{party}/environ", "rb").read(),
        "end the party": lambda: os.kill(party, 0),
        "get the party's descriptors": lambda: system_call(434, party, 0),
        "leave for a new namespace": lambda: system_call(272, 0x10000000),
        "set up io_uring": lambda: system_call(425, 1, ctypes.create_string_buffer(120)),
    }


def serve(pipe, plan, listener):
    for what, attempt in tries(plan).items():
        try:
            said = f"WORKED: {str(attempt())[:60]}"
        except OSError as e:
            said = f"refused: {os.strerror(e.errno) if e.errno else e}"
        except Exception as e:
            said = f"refused: {type(e).__name__}"
        pipe.post(Packet(LOG, data=json.dumps([what, said]).encode()))
    ran = []
    thread = threading.Thread(target=ran.append, args=(1,))
    thread.start()
    thread.join()
    pipe.post(Packet(LOG, data=json.dumps(["a thread", "ran" if ran else "did not run"]).encode()))
    pipe.flush(2.0)
