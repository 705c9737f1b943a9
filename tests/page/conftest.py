"""A kit with cells, a run that was cut off, and its page; the service is there and not connected to anything."""

import base64
import http.client
import urllib.parse

import pytest

pytest.importorskip("nvflare")
from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.deploy.approval.recovery import recover
from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.deploy.service import Service
from cloister.mpc.net.journal import SUFFIX, Journal
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.page import server
from cloister.study import Study

PARTIES = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
EVIL = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
GROUNDS = {"purpose": f"to know {EVIL}", "permit": "EK 7", "retention": "2 years", "expires": "2099-12-31"}
STUDY = Study(f"three {EVIL}", "bin-values", PARTIES, governance=GROUNDS, network={"host": "localhost", "port": 18783})
RUN = "20260131T120000Z-3f2a9c1e"
NAME = "Dr. A. Muster"


class Page:
    """A page that is served, and what a browser would ask of it."""

    def __init__(self, service, served):
        self.service, self.kit, self.served = service, service.kit, served
        self.port = served.server_address[1]

    def login(self, token=None, name=NAME):
        said = f"{name}:{self.served.token if token is None else token}"
        return {"Authorization": "Basic " + base64.b64encode(said.encode()).decode()}

    def ask(self, method, path, body=None, *, login=True, **headers):
        """Status, headers and text of an answer; a header that is None is left out."""
        given = {"Host": f"127.0.0.1:{self.port}", **(self.login() if login else {}), **headers}
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for key, value in given.items():
                if value is not None:
                    link.putheader(key.replace("_", "-"), value)
            link.endheaders(body)
            answer = link.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            link.close()

    def get(self, path="/", **headers):
        return self.ask("GET", path, **headers)

    def post(self, path, fields=None, *, body=None, **headers):
        usual = {"form": self.served.form, "study": self.kit.study.digest.hex(), "by": NAME, "read": "yes"}
        raw = urllib.parse.urlencode({k: v for k, v in {**usual, **(fields or {})}.items() if v is not None}).encode()
        raw = raw if body is None else body
        kind = "application/x-www-form-urlencoded"
        return self.ask("POST", path, raw, **{"Content-Type": kind, "Content-Length": str(len(raw)), **headers})


def cut_off(kit, name=RUN):
    """Leave what a killed run leaves, and have it closed; returns its folder."""
    header = {"study": kit.study.name, "study_digest": kit.study.digest.hex(), "party": "basel", "role": "site"}
    header |= {"workflow": "bin-values", "mode": "hardened", "version": "0", "parties": dict(kit.study.parties)}
    header |= {"started": "2026-01-31T12:00:00Z", "parameters": {}, "governance": GROUNDS}
    receipt = Receipt(header, Journal(kit.path / "results" / name / f"basel{SUFFIX}"))
    receipt.add(Entry("sent", "secure_sum", "L1", "secure_sum.Keys", "hub", 100, "ab" * 32, "1"))
    recover(kit)
    return kit.path / "results" / name


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    made = provision(STUDY, tmp_path_factory.mktemp("kits"))
    write_cells(demo_sites()["basel"], made["basel"] / "cells.h5ad")
    cut_off(Kit.open(made["basel"]))
    return made


def serve(kit):
    service = Service(kit)
    return service, server.serve(service, 0)


@pytest.fixture(scope="module")
def served(kits):
    service, serving = serve(Kit.open(kits["basel"]))
    with serving as one:
        yield service, one


@pytest.fixture
def page(served):
    kit = served[0].kit
    policy = kit.policy_file.read_text()
    yield Page(*served)
    kit.policy_file.write_text(policy)
    for name in ("approvals.json", "runs.json", "budget.json", "decisions.jsonl", "users.json"):
        (kit.path / "local" / name).unlink(missing_ok=True)


@pytest.fixture
def hub(kits):
    service, serving = serve(Kit.open(kits["hub"]))
    with serving as served:
        yield Page(service, served)


@pytest.fixture
def page_of():
    """The class, for pages that a test serves by itself."""
    return Page
