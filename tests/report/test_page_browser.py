"""The report in a headless Chromium."""

import pytest

from browser import problems, requests
from cloister.cells import demo as demo_data
from cloister.rehearsal.rehearsal import Fault, rehearse
from cloister.report.page import write_report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    sites, cut = demo_data.demo_sites(), Fault("truncate", sender="basel", name="common_seed.Key")
    runs = [rehearse("bin-values", sites, mode=mode) for mode in ("hardened", "published")]
    runs.append(rehearse("bin-values", sites, faults=[cut], check=False))
    table = [("mode", "federated", "what an attack finds"), ("hardened", "100 %", "x" * 200)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(path, runs, title="Three hospitals", table=table)


@pytest.mark.parametrize(("width", "dark"), [(1100, False), (360, False), (360, True)])
def test_loads_in_a_browser(chromium, page, width, dark):
    events = chromium.open(page, width=width, dark=dark)
    assert problems(events) == []
    assert requests(events) == [page.as_uri()]
    assert chromium.eval("[...document.images].map(i => i.complete && i.naturalWidth > 100)") == [True] * 4
    chromium.eval("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.eval("document.documentElement.scrollWidth <= innerWidth")
    tall = "[...document.querySelectorAll('svg[role=img]')].every(s => s.getBoundingClientRect().height > 50)"
    assert chromium.eval(tall)
    ground = chromium.eval("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 24, 27)") == dark


def test_the_policy_stops_requests_and_scripts(chromium, page, tmp_path):
    """Were something to slip through escaping, the browser would still not run or fetch it."""
    leaky = tmp_path / "leaky.html"
    evil = "<script>document.title='evil'</script><img src='http://127.0.0.1:9/x.png'>"
    evil += "<img src=x onerror=\"document.title='evil'\">"
    leaky.write_text(page.read_text().replace("</main>", f"{evil}</main>"))
    events = chromium.open(leaky)
    assert chromium.eval("document.title") == "Three hospitals"
    sent = [e for e in events if e.get("method") == "Network.responseReceived"]
    assert [e["params"]["response"]["url"] for e in sent if not e["params"]["response"]["url"].startswith("data:")] == [
        leaky.as_uri()
    ]
    assert problems(events)  # and the test above would have seen it


def test_keyboard(chromium, page):
    chromium.open(page)
    chromium.press("Tab")
    assert chromium.eval("document.activeElement.textContent") == "Skip to the results"
    assert chromium.eval("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.press("Enter")
    assert chromium.eval("location.hash") == "#main"


def test_print_unfolds_everything(chromium, page):
    chromium.open(page)
    hidden = "[...document.querySelectorAll('details table')].filter(t => !t.checkVisibility()).length"
    assert chromium.eval(hidden) > 10
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.eval(hidden) == 0
    chromium.call("Emulation.setEmulatedMedia", media="")
