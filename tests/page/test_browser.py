"""The page of a party in a headless Chromium: at a desk and on a phone, with and without script."""

import pytest

from browser import problems, requests
from cloister.deploy.logs import Teller
from cloister.errors import RefusedError
from cloister.mpc.net.events import Event
from cloister.page import server
from cloister.study import Party

RUN = "20260131T120000Z-3f2a9c1e"
LIVE = bytes.fromhex("77" * 16)
FOCUS = "(e => e.name || e.textContent)(document.activeElement)"


def address(page, path=""):
    return f"http://Ann:{page.served.token}@127.0.0.1:{page.port}/{path}"


def wait(chromium, expression):
    """Until something is so; the page looks once a second."""
    asked = f"new Promise(r => {{ const f = () => ({expression}) ? r(true) : setTimeout(f, 100); f(); }})"
    assert chromium.eval(asked)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True)])
def test_it_fits_and_loads_nothing_from_elsewhere(chromium, page, width, dark):
    for path in ("", f"runs/{RUN}"):
        events = chromium.open(address(page, path), width=width, dark=dark)
        assert problems(events) == []
        assert {url.split("/")[2].rpartition("@")[2] for url in requests(events)} == {f"127.0.0.1:{page.port}"}
        assert "evil" not in chromium.eval("document.title").partition("<")[0]
        assert chromium.eval("document.title").startswith(("basel: three <script>", "Run of 2026"))
        assert chromium.eval("document.documentElement.scrollWidth <= innerWidth")
        hidden = "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth).length"
        assert chromium.eval(hidden) == 0  # no column of a table is out of sight
        assert chromium.eval("getComputedStyle(document.body).backgroundColor") == (
            "rgb(20, 24, 27)" if dark else "rgb(247, 247, 244)"
        )
    small = "[...document.querySelectorAll('button')].filter(b => b.getBoundingClientRect().height < 44).length"
    assert chromium.eval(small) == 0


def test_it_shows_a_run_as_it_goes_on_and_that_it_has_ended(chromium, page):
    chromium.open(address(page))
    assert chromium.eval("document.getElementById('stale').checkVisibility()") is False
    page.service.runs[LIVE] = None
    tell = Teller(page.kit, LIVE.hex())
    try:
        tell(Event(Party("basel"), "sent", "pooled_quantiles", "L2", "pooled_quantiles.Cut", "hub", 10, 1_200_000, 7))
        wait(chromium, "document.getElementById('now').textContent.includes('pooled_quantiles L2 Cut')")
        wait(chromium, "document.getElementById('stale').checkVisibility()")
        assert "1.2 MB" in chromium.eval("document.getElementById('now').textContent")
    finally:
        del page.service.runs[LIVE]
        tell.end()
    wait(chromium, "document.getElementById('now').textContent.includes('Nothing is running')")
    wait(chromium, "!document.getElementById('stale').checkVisibility()")


def test_it_says_that_the_service_has_ended(chromium, page):
    with server.serve(page.service, 0) as other:
        chromium.open(f"http://Ann:{other.token}@127.0.0.1:{other.server_address[1]}/")
    wait(chromium, "document.getElementById('now').textContent.includes('does not answer')")


@pytest.mark.parametrize("script", [True, False])
def test_a_decision_by_keyboard_alone_with_and_without_script(chromium, page, script):
    chromium.call("Emulation.setScriptExecutionDisabled", value=not script)
    try:
        chromium.open(address(page), width=390)
        assert chromium.eval("document.querySelector('noscript p') !== null") is not script
        seen = []
        while "Refuse" not in seen:
            chromium.press("Tab")
            seen.append(chromium.eval(FOCUS))
            assert len(seen) < 20, seen
            assert chromium.eval("document.activeElement.getBoundingClientRect().width") > 0
            assert chromium.eval("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert seen[0] == "Skip to the content"
        assert [name for name in seen if name in ("by", "read", "Approve", "Refuse")] == [
            "by",
            "read",
            "Approve",
            "Refuse",
        ]
        assert chromium.eval("document.getElementById('by').value") == "Ann"
        chromium.events.clear()
        chromium.press("Enter")
        chromium.loaded()
        assert "The study is declined" in chromium.eval("document.querySelector('[role=status]').textContent")
        assert "Refused on " in chromium.eval("document.querySelector('main').textContent")
        with pytest.raises(RefusedError, match="refused .* by Ann"):
            page.kit.check_approved(page.kit.policy())
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)


def test_nothing_is_approved_before_the_box_is_ticked(chromium, page):
    chromium.open(address(page))
    chromium.eval("document.querySelector('button.approve').click()")
    assert chromium.eval("document.getElementById('read').validity.valueMissing")
    assert not page.kit.approvals.path.exists()


def test_halt_by_click(chromium, page):
    page.kit.approvals.add(page.kit.study, "Bea", None, {})
    chromium.open(address(page), width=390)
    chromium.events.clear()
    chromium.eval("document.querySelector('button.halt').click()")
    chromium.loaded()
    assert "Halted" in chromium.eval("document.querySelector('[role=status]').textContent")
    with pytest.raises(RefusedError, match="withdrew .* by Ann"):
        page.kit.check_approved(page.kit.policy())


def test_another_page_can_neither_show_it_nor_post_to_it(chromium, page, tmp_path):
    """Logged in, in the same browser: a form of another page, and a frame."""
    chromium.open(address(page))
    target = f"http://127.0.0.1:{page.port}"
    fields = f"<input name=form value={page.served.form}><input name=study value={page.kit.study.digest.hex()}>"
    evil = tmp_path / "evil.html"  # it has even got hold of the secret
    evil.write_text(f"<form method=post action={target}/refuse>{fields}<button>x</button></form><iframe src={target}/>")
    assert "frame" in str(problems(chromium.open(evil)))
    chromium.events.clear()
    chromium.eval("document.querySelector('button').click()")
    chromium.loaded()
    assert "This request came from another page" in chromium.eval("document.body.textContent")
    assert not page.kit.approvals.path.exists()
