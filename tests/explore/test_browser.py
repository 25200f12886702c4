"""The page in a real browser: driven by mouse and by keys, and looked at by axe-core."""

from __future__ import annotations

import os
import platform
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs playwright")
pytest.importorskip("uvicorn", reason="needs the extra counterflow[explore]")

import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from counterflow.explore.serve import listening
from counterflow.explore.web_app import application
from counterflow.training import load_config

from .test_runs import run_at, timeline

expect.set_options(timeout=60_000)  # a busy machine is no failure
CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no browser: {CHROMIUM} is not there (make browser installs it)"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second with a slow worker."""
    place = tmp_path_factory.mktemp("runs")
    run_at(place / "even", live__json=timeline().dumps())
    run_at(place / "slow", steps=2, live__json=timeline(slower=2).dumps())
    return place


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[str]:
    with listening("127.0.0.1", 0) as server_socket:
        served = uvicorn.Server(uvicorn.Config(application(places=[runs]), log_level="error"))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [server_socket]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server_socket.getsockname()[1]}"
        served.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chromium
        chromium.close()


SIZE: Any = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    """One for all tests: a new one begins with a process of its own, which takes a second of a core."""
    return browser.new_context(viewport=SIZE).new_page()


@pytest.fixture
def page(tab: Page, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The tab, as a new one, with no messages but those of an answer's status that a test names."""
    tab.set_viewport_size(SIZE)
    tab.emulate_media(color_scheme="light")
    with quiet(tab, getattr(request, "param", 0)):
        yield tab
    tab.unroute_all()


@contextmanager
def quiet(page: Page, status: int = 0) -> Iterator[Page]:
    """A page of which nothing is said in the console, except, where it is given, an answer's status."""
    errors: list[str] = []

    def failed(error: Any) -> None:
        errors.append(str(error))

    def said(message: Any) -> None:
        if message.type == "error":
            errors.append(message.text)

    page.on("pageerror", failed)
    page.on("console", said)
    yield page
    page.goto("about:blank")
    page.remove_listener("pageerror", failed)
    page.remove_listener("console", said)
    assert [error for error in errors if f"status of {status} " not in error] == []


def opened(page: Page, address: str) -> Page:
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


def seen(page: Page) -> None:
    """Check that axe-core finds nothing serious on the page, and that it is not wider than the window."""
    from axe_playwright_python.sync_playwright import Axe

    report: dict[str, Any] = Axe().run(page).response
    serious = [v for v in report["violations"] if v["impact"] in ("serious", "critical")]
    assert serious == [], [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in serious]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


WIDE, PHONE = SIZE["width"], 390


def narrow(page: Page, address: str) -> Page:
    page.set_viewport_size({"width": PHONE, "height": 844})
    return opened(page, address)


def looks(page: Page, address: str) -> None:
    """Wide and narrow, light and dark, with what the page begins with, and the form that a phone opens.

    axe-core looks at a dark phone with the form open: what else there is stays where it was.
    Pictures of it are kept where EXPLORE_PICTURES names a folder.
    """
    for width in (WIDE, PHONE):
        page.set_viewport_size({"width": width, "height": 900})
        opened(page, address).wait_for_selector("html[data-shown]", timeout=60_000)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            if (width, scheme) != (PHONE, "dark"):
                seen(page)
            if folder := os.environ.get("EXPLORE_PICTURES"):
                name = re.sub(r"[^a-z]+", "-", address.partition("?")[0].rpartition("/")[2])
                page.screenshot(path=f"{folder}/{name}-{scheme}-{width}.png", full_page=True)
    page.locator(".side > summary").click()
    for inner in page.locator(".side details > summary").all():
        inner.click()
    seen(page)


DAPPLE = "/schedules?a.scheme=dapple&a.stages=2&a.micro_batches=2"


def test_schedules_look_right(page: Page, server: str) -> None:
    looks(page, server + DAPPLE + "&b.scheme=gpipe&b.stages=2&b.micro_batches=4")
    expect(
        page.get_by_role("region", name="gpipe(stages=2, micro_batches=4, groups=1)", exact=True)
    ).to_contain_text("15 F")


def test_an_op_is_dragged_and_brought_back(page: Page, server: str) -> None:
    """B0 of worker 0 before its forward: a circle, told and drawn; undo brings all back."""
    opened(page, server + DAPPLE)
    canvas = page.locator("canvas")
    place = canvas.bounding_box()
    assert place is not None
    plot = place["width"] - 46 - 42
    y = place["y"] + 15

    def x(time_: float) -> float:
        return float(place["x"] + 46 + plot * time_ / 9)

    page.mouse.move(x(5), y)
    page.mouse.down()
    page.mouse.move(x(3), y, steps=3)
    page.mouse.move(x(0.2), y, steps=3)
    page.mouse.up()
    expect(page.locator("main")).to_contain_text("the workers wait in a circle")
    expect(page.locator("main")).to_contain_text("Breaks the rule “forward before its backward”")
    assert page.locator("main").inner_text().count("the workers wait in a circle") == 1
    expect(page.get_by_role("tooltip")).to_be_hidden()
    seen(page)
    assert "a.moves=0.2.0" in page.url
    page.get_by_role("button", name="Undo move").click()
    expect(page.locator("main")).to_contain_text("As its scheme makes it.")
    assert "moves" not in page.url


def test_by_keyboard_alone(page: Page, server: str) -> None:
    """Another scheme is chosen, an op is sent to another place and back, and the checker asked."""
    opened(page, server + DAPPLE)
    _tab_to(page, "SELECT")
    page.keyboard.type("gpipe")
    expect(page.get_by_role("heading", name="gpipe(")).to_be_visible()
    _tab_to(page, "CANVAS")
    page.keyboard.press("n")
    expect(page.get_by_role("tooltip")).to_contain_text("Forward of micro-batch 0")
    page.keyboard.press("]")
    expect(page.locator("main")).to_contain_text("1 op moved")
    expect(page.locator("html")).to_have_attribute("data-checked", "1")  # what was moved is checked by itself
    expect(page.get_by_role("tooltip")).to_contain_text("Forward of micro-batch 0")
    page.keyboard.press("Control+z")
    expect(page.locator("main")).not_to_contain_text("1 op moved")
    expect(page.locator("main")).to_contain_text("As its scheme makes it.")
    _tab_to(page, "BUTTON", "Check it")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("Correct: every rule holds.")


def test_runs_look_right(page: Page, server: str, runs: Path) -> None:
    looks(page, f"{server}/runs?run={runs / 'slow'}")
    expect(page.locator("main")).to_contain_text("2.00, slow")
    marks = page.locator("svg.lines").first.locator("text").all_text_contents()
    assert marks == ["1.5", "2", "2.5", "3", "0", "1", "2"]
    expect(page.get_by_role("img", name="Training loss")).to_be_visible()


def test_a_run_is_followed_and_compared_by_keys(page: Page, server: str, runs: Path) -> None:
    """A step that is written is on the page at the next look; then the other run beside it."""
    opened(page, f"{server}/runs?run={runs / 'even'}")
    expect(page.get_by_role("status")).to_contain_text("step 3")
    with (runs / "even" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.25, "seconds": 0.4}\n')
    expect(page.get_by_role("status")).to_contain_text("step 4")
    expect(page.locator("figure").first).to_contain_text("0.25 at step 4")
    for _ in range(9):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type === 'checkbox' && !document.activeElement.checked"):
            break
    page.keyboard.press("Space")
    expect(page.locator("canvas")).to_have_count(2)
    expect(page.get_by_role("heading", name="slow: measured, step 3")).to_be_visible()
    for place in ("path", ".keys line"):  # the legend has the strokes of the lines
        strokes = page.locator("figure").first.locator(place)
        assert strokes.evaluate_all("all => all.map(one => one.getAttribute('stroke-dasharray'))") == [
            "",
            "7 4",
        ]


def test_the_newest_run_that_has_something_is_chosen(page: Page, server: str, runs: Path) -> None:
    """An empty one is not; of a run that was stopped it is said what it has not, and not that it may come."""
    empty = run_at(runs / "empty", steps=0, config__toml="")
    try:
        opened(page, f"{server}/runs")
        expect(page.get_by_role("checkbox", name="empty, stopped, step 0")).not_to_be_checked()
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)
        opened(page, f"{server}/runs?run={empty}")
        expect(page.locator("figure").first).to_contain_text("none was recorded")
        expect(page.locator("main")).to_contain_text("no timeline: it was stopped before one was written")
        expect(page.locator("main")).not_to_contain_text("nothing yet")
    finally:
        shutil.rmtree(empty)


HIDE = "hidden => Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true })"


def test_a_hidden_page_asks_nothing(page: Page, server: str) -> None:
    """Neither for a run nor for a search; once it is seen again it goes on."""
    urls: list[str] = []

    def noted(request: Any) -> None:
        urls.append(request.url)

    page.on("request", noted)
    page.route("**/api/plan", lambda route: route.fulfill(json={"job": "x"}))
    going = {"state": "running", "error": "", "result": None, "progress": {"said": "still", "share": 1.0}}
    page.route("**/api/job", lambda route: route.fulfill(json=going))
    for address, path in (("/runs", "/api/run"), ("/plans", "/api/job")):
        opened(page, server + address)
        with page.expect_request(f"**{path}"):
            pass
        page.evaluate(HIDE, True)
        for _ in range(20):  # what was asked before may take its time
            urls.clear()
            page.wait_for_timeout(1200)
            if not urls:
                break
        assert urls == []
        page.evaluate(HIDE, False)
        with page.expect_request(f"**{path}"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.remove_listener("request", noted)
    # A search that goes on has no full bar.
    assert page.get_by_role("progressbar", name="Plan").get_attribute("value") is None


def test_a_phone_shows_the_timeline_first(browser: Browser, server: str) -> None:
    """The form opens by a click; what is written above the memory has room beside its peaks."""
    with browser.new_context() as context, quiet(context.new_page()) as page:
        _the_timeline_first(page, server)


def _the_timeline_first(page: Page, server: str) -> None:
    page.add_init_script(
        "window.written = []; const plain = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, ...more) {"
        " if (this.textAlign === 'left') written.push([text, x, x + this.measureText(text).width]);"
        " plain.call(this, text, x, ...more); };"
    )
    costs = "&activation_bytes=1234567"
    narrow(page, server + DAPPLE + costs).wait_for_selector("html[data-shown]")
    place = page.locator("canvas").bounding_box()
    assert place is not None
    assert place["y"] < 500
    (_, _, right), (_, left_edge, _) = page.evaluate(
        "written.filter(one => /full row|^peak$/.test(one[0])).slice(-2)"
    )
    assert right < left_edge
    expect(page.get_by_label("scheme")).to_be_hidden()
    page.get_by_text("Schedule, costs, limits").click()
    expect(page.get_by_label("scheme")).to_be_visible()
    page.set_viewport_size({"width": WIDE, "height": 900})
    expect(page.get_by_label("scheme")).to_be_visible()


def test_each_schedule_has_its_own_costs(page: Page, server: str) -> None:
    """Costs of a stage are two models, which the page says, and one click makes one of them."""
    opened(page, server + DAPPLE + "&b.scheme=zb-v&b.workers=2&b.micro_batches=2")
    makespans = page.locator("dl.facts > div:first-child dd")
    expect(makespans).to_have_text(["9 F", "14 F"])
    expect(page.locator(".note")).to_contain_text(
        "These are two models: with one micro-batch, all stages compute 6 F"
    )
    expect(page.locator(".note")).to_contain_text("zb-v has 4 stages on 2 workers")
    page.get_by_role("button", name="Give costs of a worker's share").click()
    expect(makespans).to_have_text(["9 F", "7 F"])
    expect(page.locator(".note")).not_to_contain_text("two models")
    second = page.get_by_role("group", name="Costs of the second")
    second.get_by_text("Seconds", exact=True).click()
    second.get_by_label("forward", exact=True).fill("2")
    expect(makespans).to_have_text(["9 F", "9.5 s"])
    expect(page).to_have_url(re.compile("costs_of=worker.*b.forward=2"))
    opened(page, page.url)
    expect(makespans).to_have_text(["9 F", "9.5 s"])


@pytest.mark.parametrize("page", [422], indirect=True)
def test_the_box_with_a_mistake_is_marked(page: Page, server: str) -> None:
    opened(page, server + DAPPLE)
    forward = page.get_by_label("forward", exact=True)
    forward.fill("abc")
    expect(page.get_by_role("alert")).to_contain_text("forward=abc: cannot read 'abc'")
    expect(forward).to_have_attribute("aria-invalid", "true")
    seen(page)
    forward.fill("1")
    expect(page.get_by_role("alert")).to_be_empty()
    expect(forward).not_to_have_attribute("aria-invalid", "true")
    page.get_by_text("Bytes", exact=True).click()
    weights = page.get_by_label("weight bytes")  # what the record calls weights
    weights.fill("1,2,3")
    expect(page.get_by_role("alert")).to_contain_text("weight bytes: 3 numbers for 2 stages")
    expect(weights).to_have_attribute("aria-invalid", "true")
    opened(page, f"{server}/compare?workers=0&micro_batches=4")
    expect(page.get_by_role("alert")).to_contain_text("workers: must be 1 or more")


@pytest.mark.parametrize("page", [422], indirect=True)
def test_a_run_that_is_removed_makes_place_for_another(page: Page, server: str, runs: Path) -> None:
    gone = run_at(runs / "gone", steps=2)
    opened(page, f"{server}/runs?run={gone}")
    expect(page.get_by_role("status")).to_contain_text("gone: stopped, step 2")
    shutil.rmtree(gone)
    expect(page.get_by_role("status")).not_to_contain_text("gone")
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)


COMPARED = "/compare?workers=2&micro_batches=4&peak=2&seconds=1"


def test_schemes_are_compared_and_one_is_opened(page: Page, server: str) -> None:
    """The page begins with a result; a computed order opens as well as a scheme."""
    looks(page, server + COMPARED)
    page.set_viewport_size({"width": WIDE, "height": 900})
    rows = page.get_by_role("region", name="All schemes, the quickest first")
    expect(rows).to_be_visible(timeout=60_000)
    rows.get_by_role("button", name="zb-v").click()
    expect(page.locator("dd").first).to_have_text("12.5 F")
    expect(page).to_have_url(re.compile("a.scheme=zb-v.*costs_of=worker"))
    opened(page, server + COMPARED)
    page.get_by_role("button", name="computed in a V").click()
    expect(page).to_have_url(re.compile("a.file="))
    expect(page.locator("dd").first).to_have_text("12.5 F")


def test_a_plan_is_made_and_looked_at_by_keys(page: Page, server: str) -> None:
    """A small mini-batch plans in a second; each scheme has its picture."""
    looks(page, f"{server}/plans?example=hanayo-bert64&mini_batch=2")
    _tab_to(page, "BUTTON", "Plan")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="The best plan of every scheme")).to_be_visible(timeout=60_000)
    expect(page.locator("canvas")).to_have_count(1)
    seen(page)
    first = page.locator("h3").last.inner_text()
    _tab_to(page, "BUTTON", "2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=first)).to_have_count(0)


def test_plans_begin_with_one_that_opens_and_is_saved(page: Page, server: str, tmp_path: Path) -> None:
    """With its costs: the schedule takes as long as the plan says, also where its order is computed."""
    opened(page, f"{server}/plans")
    expect(page.get_by_role("region", name="The best plan of every scheme")).to_be_visible()
    planned = page.locator(".timeline p").first.inner_text()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save plan.toml").click()
    saved.value.save_as(tmp_path / "plan.toml")
    assert saved.value.suggested_filename == "plan.toml"
    scheme = load_config(tmp_path / "plan.toml").schedule.scheme
    page.get_by_role("button", name=str(scheme), exact=True).click()
    expect(page).to_have_url(re.compile("a.costs=plan"))
    expect(page.locator(".timeline p").first).to_have_text(planned)
    expect(page.get_by_role("group", name="Costs", exact=True)).to_contain_text("The plan's costs")
    seen(page)
    page.get_by_label("seconds", exact=True).fill("1")
    page.get_by_role("button", name="Compute the order").click()
    expect(page.locator("canvas")).to_have_count(2)
    expect(page.get_by_role("group", name="Costs of the second")).to_contain_text("The plan's costs")
    page.get_by_role("button", name="Give other costs").first.click()
    expect(page.locator(".note")).to_contain_text("Only one of the two has a plan's costs")


def test_an_order_is_computed_beside_its_schedule(page: Page, server: str) -> None:
    opened(page, server + DAPPLE)
    page.get_by_label("backwards").select_option("yes")
    page.get_by_role("button", name="Compute the order").click()
    expect(page.locator("canvas")).to_have_count(2, timeout=60_000)
    expect(page.get_by_role("group", name="Computed order")).to_contain_text("none: no order is better")
    assert "b.file=" in page.url
    region = page.get_by_role("group", name="Computed order")
    expect(region).to_contain_text("the best named scheme, zb-h1")
    box = region.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < SIZE["height"]  # beside the pictures, not below what is seen
    region.get_by_text("Bound, and how to get it").click()
    expect(region).to_contain_text("counterflow synthesize --placement 0,1")


def _tab_to(page: Page, tag: str, text: str = "") -> None:
    for _ in range(80):
        page.keyboard.press("Tab")
        at = page.evaluate("[document.activeElement.tagName, document.activeElement.textContent]")
        if at[0] == tag and text in at[1]:
            return
    raise AssertionError(f"Tab does not lead to {tag} {text}")


def test_the_address_holds_the_state(page: Page, server: str) -> None:
    opened(page, server + DAPPLE)
    page.get_by_label("forward", exact=True).fill("1,3")
    expect(page.locator("dd").first).to_have_text("13 s")
    expect(page).to_have_url(re.compile("forward=1%2C3"))
    opened(page, page.url)
    expect(page.locator("dd").first).to_have_text("13 s")


def test_a_run_that_starts_is_shown(page: Page, server: str, runs: Path) -> None:
    """Where nobody has chosen one, the page turns to the run that begins, also before its first step."""
    opened(page, f"{server}/runs")
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)
    lock = f"process {os.getpid()} on {platform.node()}\n"
    begun = run_at(runs / "begun", steps=0, config__toml="", __lock=lock)
    try:
        expect(page.get_by_role("checkbox", name="begun, running, step 0")).to_be_checked()
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(1)
    finally:
        shutil.rmtree(begun)
