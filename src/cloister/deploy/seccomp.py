"""Which system calls a confined process may make: the table, and the BPF program for seccomp that is built from it."""

from __future__ import annotations

import errno
import socket
import struct

# Numbers of system calls: x86-64, aarch64 (None: it has none). What they would open is said beside them.
Numbers = tuple[int | None, int | None]
REFUSED: dict[str, Numbers] = {
    # another program, another process
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    # another process's memory, descriptors, life
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # files out of memory, and files by number, which Landlock's rules about paths do not see
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # large and often broken parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory and messages shared with other processes
    "socketpair": (53, 199),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    # another view of the system
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "personality": (135, 92),
    # the machine itself, where the service runs as root
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "vhangup": (153, 58),
    # files are only read: nothing is made, renamed, cut short or given other rights, on any level of Landlock
    "truncate": (76, 45),
    "creat": (85, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # a datagram or a pathname socket cannot be made; a socket is not bound either
    "bind": (49, 200),
    "listen": (50, 201),
}
NO_SOCKET = {"socket": (41, 198), "connect": (42, 203)}  # the coordinator has its listener already
NO_ACCEPT = {"accept": (43, 202), "accept4": (288, 242)}  # nobody connects to a site
SOCKET, CLONE, PRLIMIT, TGKILL = (41, 198), (56, 220), (302, 261), (234, 131)
MISSING: dict[str, Numbers] = {
    "clone3": (435, 435),
    "openat2": (437, 437),
}  # their flags lie in memory; libc then uses clone and openat
OPENING: dict[Numbers, int] = {(2, None): 1, (257, 56): 2}  # open, openat: which has the flags
SENDING: dict[Numbers, int] = {
    (44, 206): 3,
    (46, 211): 2,
    (307, 269): 3,
}  # sendto, sendmsg, sendmmsg: which argument has the flags
LAST_KNOWN = 461  # newer calls, which nobody has looked at, do not exist here
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, ABOVE, MASKED, AND, END = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06  # classic BPF
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`
X32 = 0x40000000
CLONE_THREAD, MSG_FASTOPEN = 0x00010000, 0x20000000
TO_WRITE = 0x3 | 0x40 | 0x200  # O_WRONLY and O_RDWR, O_CREAT, O_TRUNC


def build_filter(machine: str, *, may_connect: bool, pid: int) -> bytes:
    """The program that checks every system call of process `pid`: instructions of 8 bytes."""
    which, architecture = ARCHITECTURES[machine]
    refused = REFUSED | (NO_ACCEPT if may_connect else NO_SOCKET)
    code: list[tuple[int, int, int, int]] = []

    def low(argument: int) -> None:
        code.append((LOAD, 0, 0, ARGUMENTS + 8 * argument))

    def answer(error: int) -> tuple[int, int, int, int]:
        return (END, 0, 0, ERROR | error)

    code += [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (END, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        code += [(MASKED, 0, 1, X32), (END, 0, 0, KILL)]
    code += [(ABOVE, 0, 1, LAST_KNOWN), answer(errno.ENOSYS)]
    for table, error in ((MISSING, errno.ENOSYS), (refused, errno.EPERM)):
        for numbers in table.values():
            if (number := numbers[which]) is not None:
                code += [(EQUAL, 0, 1, number), answer(error)]
    # a new thread, but no new process
    code += [(EQUAL, 0, 4, CLONE[which])]
    low(0)
    code += [(MASKED, 1, 0, CLONE_THREAD), answer(errno.EPERM), (END, 0, 0, ALLOW)]
    # files are opened to be read
    for numbers, argument in OPENING.items():
        if (number := numbers[which]) is not None:
            code += [(EQUAL, 0, 4, number)]
            low(argument)
            code += [(MASKED, 0, 1, TO_WRITE), answer(errno.EPERM), (END, 0, 0, ALLOW)]
    # signals to one's own threads only
    code += [(EQUAL, 0, 4, TGKILL[which])]
    low(0)
    code += [(EQUAL, 1, 0, pid), answer(errno.EPERM), (END, 0, 0, ALLOW)]
    # one's own limits only: pid 0
    code += [(EQUAL, 0, 4, PRLIMIT[which])]
    low(0)
    code += [(EQUAL, 1, 0, 0), answer(errno.EPERM), (END, 0, 0, ALLOW)]
    # data with the first packet would connect past Landlock
    for numbers, argument in SENDING.items():
        code += [(EQUAL, 0, 4, numbers[which] or 0)]
        low(argument)
        code += [(MASKED, 0, 1, MSG_FASTOPEN), answer(errno.EPERM), (END, 0, 0, ALLOW)]
    # TCP over IPv4 or IPv6 and nothing else; Landlock's ports are TCP's, and not those of MPTCP or SCTP
    code += [(EQUAL, 1, 0, SOCKET[which]), (END, 0, 0, ALLOW)]
    low(0)
    code += [(EQUAL, 2, 0, socket.AF_INET), (EQUAL, 1, 0, socket.AF_INET6), answer(errno.EPERM)]
    low(1)
    code += [(AND, 0, 0, 0xF), (EQUAL, 1, 0, socket.SOCK_STREAM), answer(errno.EPERM)]
    low(2)
    code += [(EQUAL, 2, 0, 0), (EQUAL, 1, 0, socket.IPPROTO_TCP), answer(errno.EPERM), (END, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)
