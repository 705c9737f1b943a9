"""The server of a party's page: `cloister site KIT --page`, or `cloister page KIT KIT ...` for several studies.

It listens at 127.0.0.1 alone, and answers named users (`page.users`). Where there are none, it answers who knows the
token, which is made anew at every start and lies in the kit for its owner only (`page.token`, 0600). Four things keep
others out:

    other machines       the loopback address, and a `Host` that is this machine's: a name that somebody points at
                         127.0.0.1 is not
    other users here     the token, as the password of HTTP's own log-in; browsers keep that by address and port, and
                         hand it to no other server on this machine, as they would a cookie
    other pages          what changes something is a POST with a secret from the form, of the same origin; no other
                         page may show this one in a frame, or read it
    texts in the study   escaped, and under a policy by which the browser runs and loads nothing but /page.js and
                         /style.css
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import re
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cloister import files
from cloister.deploy.kit import Kit
from cloister.deploy.service import Service
from cloister.deploy.start import say
from cloister.deploy.status import metrics
from cloister.errors import CloisterError, UsageError
from cloister.mpc.crypto.entropy import Entropy
from cloister.page import users, view
from cloister.page.decide import Decisions
from cloister.page.state import Place, State, find_run, snapshot
from cloister.rehearsal.results import load_runs
from cloister.report.page import report_text
from cloister.report.parts import POLICY as REPORT

HERE, PORT = "127.0.0.1", 8642
TOKEN = "page.token"  # in the kit
HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")  # any port: a tunnel may end at another one
STUDY = re.compile(r"/study/(\d{1,4})(/.*)?")  # on a page of several studies
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
AT_ONCE, SILENT = 16, 10.0  # connections, and seconds after which one that says nothing is closed
MOST = 4096  # bytes of a form
CHANGES = ("/approve", "/refuse", "/halt")
WRONG_HOST = "This page is for this machine only: open http://127.0.0.1, or a tunnel to it."
NO_TOKEN = f"Log in with your name, and as the password what is in {TOKEN} in the kit's folder."
NO_USER = "Log in with your name and your own token; cloister page KIT --add-user makes one."


@contextlib.contextmanager
def serve(what: Service | Sequence[Path], port: int = PORT) -> Iterator[PageServer]:
    """Serve the page of a service's party, or of several kits, in the background.

    As long as there are no named users, its token is in the first kit, and goes at the end.
    """
    places = [Place(what.kit.path, what)] if isinstance(what, Service) else [Place(Path(p)) for p in what]
    path = places[0].path / TOKEN
    with PageServer(places, port) as server:
        files.write(path, server.token + "\n")
        thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            path.unlink(missing_ok=True)
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def beside(what: Service | Sequence[Path], port: int = PORT) -> Iterator[None]:
    """The page of a service that starts, told to who started it; never the token, which a journal would keep."""
    with serve(what, port) as server:
        if server.named:
            say(f"page: {server.address}; log in with your name and your own token")
        else:
            token = server.places[0].path / TOKEN
            say(f"page: {server.address}; log in with your name, and as password what is in {token}")
        yield


class PageServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Listens for browsers of this machine."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, AT_ONCE

    def __init__(self, places: Sequence[Place], port: int) -> None:
        entropy = Entropy()
        self.places = [*places]
        self.decided = [Decisions(place) for place in places]
        self.token, self.form = entropy.bytes(32).hex(), entropy.bytes(32).hex()
        self._rooms = threading.BoundedSemaphore(AT_ONCE)
        try:
            super().__init__((HERE, port), Answer)
        except (OSError, OverflowError) as e:
            why = getattr(e, "strerror", None) or "no such port"
            raise UsageError(f"the page cannot be served at port {port} ({why}); choose another with --port") from None

    @property
    def decisions(self) -> Decisions:
        return self.decided[0]

    @property
    def named(self) -> bool:
        """Whether there are named users, so that the common token counts no more."""
        return any(users.load(place.path) for place in self.places)

    @property
    def address(self) -> str:
        return f"http://{HERE}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._rooms.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._rooms.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away; what else can fail has been answered."""


class Problem(Exception):
    """Why a request is not answered as it wishes: a status, and a sentence."""

    def __init__(self, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers or {}


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    timeout = SILENT
    server_version, sys_version = "Cloister", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, how: Any) -> None:
        try:
            self._check_host()
            self._check_user()
            self._route(how)
        except Problem as p:
            self._send(p.status, view.notice(p.status.phrase, p.text), headers=p.headers)
        except CloisterError as e:  # of the kit: what is wrong with it is for its owner to read
            self._send(HTTPStatus.CONFLICT, view.notice("This cannot be shown", str(e)))

    # -- who may ask -----------------------------------------------------------------------------------------------

    def _check_host(self) -> None:
        said = self.headers.get_all("Host") or []
        self.origins = {f"http://{said[0]}"} if len(said) == 1 else set()
        if len(said) == 1 and said[0] in self._settings("hosts"):
            self.origins.add(f"https://{said[0]}")
        elif len(said) != 1 or not HOSTS.fullmatch(said[0]):
            raise Problem(HTTPStatus.MISDIRECTED_REQUEST, WRONG_HOST)

    def _settings(self, key: str) -> list[str]:
        """What all kits say under [page]; one that cannot be read says nothing."""
        found: list[str] = []
        for place in self.server.places:
            with contextlib.suppress(CloisterError):
                said = Kit.open(place.path).policy().page.get(key, [])
                found += said if isinstance(said, list) else [said]
        return found

    def _check_user(self) -> None:
        """Who asks, and what of each kit this user may do: None, "look" or "decide"."""
        kind, _, said = self.headers.get("Authorization", "").partition(" ")
        try:
            raw = base64.b64decode(said, validate=True) if kind.lower() == "basic" else b""
        except (binascii.Error, ValueError):
            raw = b""
        name, _, password = raw.partition(b":")
        self.who, token = name.decode(errors="replace"), password.decode(errors="replace").strip()
        ask = {"WWW-Authenticate": 'Basic realm="Cloister", charset="UTF-8"'}
        if not self.server.named:
            if not hmac.compare_digest(token.encode(), self.server.token.encode()):
                raise Problem(HTTPStatus.UNAUTHORIZED, NO_TOKEN, ask)
            self.known = False
            self.rights: list[str | None] = ["decide" for _ in self.server.places]
            return
        self.known = True
        by_header = self._named_by_proxy()
        found = [
            users.by_proxy(place.path, users.load(place.path), *by_header)
            if by_header is not None
            else users.by_token(users.load(place.path), self.who, token)
            for place in self.server.places
        ]
        if not any(found):
            raise Problem(HTTPStatus.UNAUTHORIZED, NO_USER, None if by_header is not None else ask)
        self.who = next(user.name for user in found if user is not None)
        self.rights = [None if user is None else "decide" if user.decides else "look" for user in found]

    def _named_by_proxy(self) -> tuple[str, str] | None:
        """The name and the secret that the hospital's log-in proxy sends; None where it is not set up or not used."""
        for header in self._settings("sso_header"):
            said, secret = self.headers.get_all(header) or [], self.headers.get_all(users.PROXY) or []
            if said or secret:
                if len(said) != 1 or len(secret) != 1:
                    raise Problem(HTTPStatus.UNAUTHORIZED, "The log-in proxy must send one name and one secret.")
                return said[0].strip(), secret[0]
        return None

    def _path(self) -> str:
        if not self.path.startswith("/"):
            raise Problem(HTTPStatus.BAD_REQUEST, "A path begins with a slash.")
        return urlsplit(self.path).path

    def _route(self, how: Any) -> None:
        """Find the study that a path is of: the only one, or the one that it names."""
        path, places = self._path(), self.server.places
        self.at, self.base = 0, ""
        if len(places) > 1 and (found := STUDY.fullmatch(path)):
            self.at, self.base = int(found[1]) - 1, f"/study/{found[1]}"
            path = found[2] or "/"
            if not 0 <= self.at < len(places) or self.rights[self.at] is None:
                raise Problem(HTTPStatus.NOT_FOUND, "There is no such study.")
        elif len(places) > 1 and path not in ("/style.css", "/page.js", "/metrics"):
            if path != "/" or how != self._get:
                raise Problem(HTTPStatus.NOT_FOUND, "There is no such page.")
            self._send(HTTPStatus.OK, view.overview(self._states(), self.who))
            return
        how(path)

    def _states(self) -> list[State | tuple[str, str]]:
        """The kits that this user may see; of one that cannot be opened, its folder and why."""
        found: list[State | tuple[str, str]] = []
        for i, place in enumerate(self.server.places):
            if self.rights[i] is None:
                continue
            try:
                found.append(snapshot(place, f"/study/{i + 1}"))
            except CloisterError as e:
                found.append((str(place.path), str(e)))
        return found

    # -- what is shown ---------------------------------------------------------------------------------------------

    def _home(self, *, done: str = "", error: str = "") -> str:
        state = snapshot(self.server.places[self.at], self.base)
        may = self.rights[self.at] == "decide"
        return view.home(state, self.server.form, self.who, done=done, error=error, known=self.known, decides=may)

    def _get(self, path: str) -> None:
        if path == "/":
            done = parse_qs(urlsplit(self.path).query).get("done", [""])[0]
            self._send(HTTPStatus.OK, self._home(done=done))
        elif path == "/now":
            state = snapshot(self.server.places[self.at], self.base)
            self._send(HTTPStatus.OK, view.now(state.running), headers={"X-State": state.mark})
        elif path == "/metrics":
            self._show_metrics()
        elif path == "/style.css":
            self._send(HTTPStatus.OK, _asset("report.css") + _asset("page.css"), "text/css")
        elif path == "/page.js":
            self._send(HTTPStatus.OK, _asset("page.js"), "text/javascript")
        elif path.startswith("/runs/"):
            self._show_run(*path.removeprefix("/runs/").split("/"))
        elif path in CHANGES:
            raise Problem(HTTPStatus.METHOD_NOT_ALLOWED, "Nothing is changed by opening a link.", {"Allow": "POST"})
        else:
            raise Problem(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _show_metrics(self) -> None:
        seen = [p for p, right in zip(self.server.places, self.rights, strict=True) if right is not None]
        text = metrics(*((Kit.open(place.path), place.status()) for place in seen))
        self._send(HTTPStatus.OK, text, "text/plain; version=0.0.4")

    def _show_run(self, name: str, what: str = "", number: str = "", *more: str) -> None:
        kit = Kit.open(self.server.places[self.at].path)
        run = find_run(kit.policy().out, name)
        if run is None or more:
            raise Problem(HTTPStatus.NOT_FOUND, "There is no such run.")
        if not what:
            self._send(HTTPStatus.OK, view.one_run(run, kit.identity.public, self.base))
        elif what == "report" and not number and run.reportable:
            runs = load_runs(run.folder)
            self._send(HTTPStatus.OK, report_text(runs, title=runs[0].study.name), policy=REPORT)
        elif what == "receipt" and re.fullmatch(r"\d{1,3}", number) and int(number) < len(run.receipts):
            self._send(HTTPStatus.OK, run.receipts[int(number)].read_text(encoding="utf-8"), "application/json")
        else:
            raise Problem(HTTPStatus.NOT_FOUND, "There is no such page of this run.")

    # -- what is changed -------------------------------------------------------------------------------------------

    def _post(self, path: str) -> None:
        if path not in CHANGES:
            raise Problem(HTTPStatus.METHOD_NOT_ALLOWED, "This is only to be looked at.", {"Allow": "GET"})
        fields = self._form()
        if self.rights[self.at] != "decide":
            text = f"{self.who} may look at this study, and not decide; nothing was changed."
            raise Problem(HTTPStatus.FORBIDDEN, text)
        if self.known:
            fields["by"] = self.who  # a decision is kept with the name that logged in
        try:
            done = getattr(self.server.decided[self.at], path[1:])(fields)
        except CloisterError as e:
            self._send(HTTPStatus.CONFLICT, self._home(error=str(e)))
            return
        self._send(HTTPStatus.SEE_OTHER, "", headers={"Location": f"{self.base}/?done={done}"})

    def _form(self) -> dict[str, str]:
        """The fields of a form of this page, and of no other."""
        origin = self.headers.get("Origin", f"http://{self.headers['Host']}")
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        if origin not in self.origins or site not in ("same-origin", "none"):
            raise Problem(HTTPStatus.FORBIDDEN, "This request came from another page; nothing was changed.")
        kind, length = self.headers.get_content_type(), self.headers.get("Content-Length", "")
        if kind != "application/x-www-form-urlencoded" or not re.fullmatch(r"\d{1,6}", length) or int(length) > MOST:
            raise Problem(HTTPStatus.BAD_REQUEST, "This is not a form of this page; nothing was changed.")
        try:
            text = self.rfile.read(int(length)).decode()
            fields = {k: v[0] for k, v in parse_qs(text, max_num_fields=10, errors="strict").items()}
        except (ValueError, OSError):
            raise Problem(HTTPStatus.BAD_REQUEST, "The form could not be read; nothing was changed.") from None
        if not hmac.compare_digest(fields.get("form", "").encode(), self.server.form.encode()):
            raise Problem(HTTPStatus.FORBIDDEN, "The form is of another page or an earlier start; open the page anew.")
        return fields

    # -- the answer ------------------------------------------------------------------------------------------------

    def _send(
        self,
        status: HTTPStatus,
        text: str,
        kind: str = "text/html",
        *,
        headers: Mapping[str, str] | None = None,
        policy: str = POLICY,
    ) -> None:
        data = text.encode()
        self.send_response(status)
        for key, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A request that is none, or of another kind than GET and POST."""
        self._send(HTTPStatus(code), view.notice(HTTPStatus(code).phrase, "This request is not one of this page."))

    def log_message(self, format: str, *args: Any) -> None:
        """Looking is not logged; decisions are, by `Decisions`."""


def _asset(name: str) -> str:
    return (resources.files("cloister") / "data" / name).read_text(encoding="utf-8")


__all__ = ["PORT", "TOKEN", "PageServer", "beside", "serve"]
