"""Users of a party's page: named people, each with a token of his own or known by the hospital's log-in.

    cloister page KIT --add-user "Dr. A. Muster"          prints a token once; may decide
    cloister page KIT --add-user "B. Beispiel" --look     may only look
    cloister page KIT --add-user a.muster --sso           no token: the hospital's log-in proxy names this user

`local/users.json` holds, of each token, its SHA-256: tokens are 256 random bits, so that none can be guessed from it.
As long as there is no user, the page has one token for whoever runs the service, and asks for a name.

With `sso_header` under `[page]` in site.toml, a proxy in front of the page logs people in and writes their name into
that header. Any other program on this machine could write it, too. So the proxy also sends `X-Cloister-Proxy` with the
secret of `page.sso` in the kit; without it the header is not read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cloister import files
from cloister.deploy.approval.approval import login, stamp_now
from cloister.deploy.kit import Kit
from cloister.errors import ParameterError, UsageError
from cloister.mpc.crypto.entropy import Entropy

FILE, SECRET = "users.json", "page.sso"  # in `local`, and in the kit
PROXY = "X-Cloister-Proxy"


@dataclass(frozen=True)
class User:
    """Somebody who may see the page of a kit."""

    name: str
    decides: bool  # else only looks
    token: str = ""  # SHA-256 of the token; "" for one who comes by the hospital's log-in
    made: str = ""  # when, and by whom


def load(path: Path) -> dict[str, User]:
    """The users of the kit in `path`."""
    file = path / "local" / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        users = {str(name): User(**entry) for name, entry in raw.items()}
        if any(type(u.decides) is not bool or u.name != name for name, u in users.items()):
            raise ValueError(file)
        return users
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        raise ParameterError(f"{file} is damaged; delete it and add the users again") from None


def new_token() -> str:
    return Entropy().bytes(32).hex()


def add(kit: Kit, name: str, token: str, *, decides: bool) -> User:
    """Add a user, or give one another token; "" where the hospital's log-in names this user."""
    if not name.strip() or not name.isprintable() or len(name) > 100 or ":" in name:
        text = f"a user's name must be one line of at most 100 characters without ':', found {name[:40]!r}"
        raise ParameterError(text)
    entry = User(name.strip(), decides, digest(token) if token else "", f"{stamp_now()} by {login()}")
    _save(kit.path, {**load(kit.path), entry.name: entry})
    secret = kit.path / SECRET
    if not token and not secret.exists():
        files.write(secret, new_token() + "\n")
    return entry


def remove(kit: Kit, name: str) -> None:
    users = load(kit.path)
    if name not in users:
        raise UsageError(f"{kit.me} has no user {name!r}; users here: {', '.join(users) or 'none'}")
    del users[name]
    _save(kit.path, users)


def _save(path: Path, users: Mapping[str, User]) -> None:
    try:
        files.write(path / "local" / FILE, json.dumps({n: asdict(u) for n, u in users.items()}, indent=1))
    except OSError as e:
        raise ParameterError(f"{path / 'local' / FILE} cannot be written ({e.strerror})") from None


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def by_token(users: Mapping[str, User], name: str, token: str) -> User | None:
    """The user of this name and token; whoever has no token cannot come this way."""
    user = users.get(name)
    right = user.token if user is not None and user.token else "0" * 64
    same = hmac.compare_digest(digest(token), right)
    return user if same and user is not None and user.token else None


def by_proxy(path: Path, users: Mapping[str, User], name: str, secret: str) -> User | None:
    """The user that the hospital's log-in proxy names, if it knows the secret of this kit."""
    try:
        right = (path / SECRET).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", right) or not hmac.compare_digest(secret.strip().encode(), right.encode()):
        return None
    user = users.get(name)
    return user if user is not None and not user.token else None
