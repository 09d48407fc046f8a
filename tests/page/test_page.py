"""The page with a real broker in a real browser: it shows published notifications, explains, makes the changes it
announces, runs no foreign code, and fits a phone. Its pictures are kept in build/page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import httpx
import pytest
from broker_process import BrokerProcess
from browser_page import DESK, PARTS, PHONE, OpenPage, open_browser
from cluster_up import ClusterUp
from playwright.sync_api import Browser, Locator, Page, expect

from tidegate import connect_sync
from tidegate.demo.main_job import LATEST, REMEMBERED, START, STEP
from tidegate.devices import STATIONS, readings
from tidegate.errors import Overloaded

PICTURES = Path(__file__).parents[2] / "build" / "page"
TOKEN = "a-token-that-is-long-enough"
GETAFE = next(station for station in STATIONS if station.name == "Getafe")
# Elements that exist a moment after a part of the page is shown.
FIRST_CONTENT = {"path": "#layers li", "queues": "#queue-list > *", "pipeline": "#jobs svg"}
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"

expect.set_options(timeout=40_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser, broker: BrokerProcess) -> Iterator[OpenPage]:
    with OpenPage(browser, broker.http) as page:
        yield page


def publish(broker: BrokerProcess, *notifications: Mapping[str, object]) -> None:
    with connect_sync(broker.native) as connection:
        connection.publish(list(notifications))


def wait_until_live(page: Page) -> None:
    """Waits until the page has its streams, so that it shows everything published from now on."""
    expect(page.locator("#state-said")).to_have_text("the broker answers")
    expect(page.locator("#part-map")).to_have_attribute("data-live", "true")


class TestMap:
    def test_it_shows_all_stations_before_anything_is_published(self, opened: OpenPage) -> None:
        expect(opened.page.locator(".station")).to_have_count(len(STATIONS))
        expect(opened.page.locator("#station option")).to_have_count(len(STATIONS))
        expect(opened.page.locator("#attribution")).to_contain_text("Comunidad de Madrid")
        expect(opened.page.get_by_role("img", name=f"{len(STATIONS)} stations, 0 with readings")).to_be_visible()

    def test_a_reading_appears_as_it_is_published(self, opened: OpenPage, broker: BrokerProcess) -> None:
        page = opened.page
        wait_until_live(page)
        page.get_by_label("Station", exact=True).select_option("Getafe")
        reading = GETAFE.attributes() | {"time": "2026-01-12T08:00:00Z", "NO2": 61.0, "O3": 12.0}
        publish(broker, reading, reading | {"time": "2026-01-12T09:00:00Z", "NO2": 151.0})
        expect(page.locator(f"[data-station='{GETAFE.code}'].level-6 .level")).to_have_text("6")
        expect(page.locator("#latest")).to_contain_text("151")
        expect(page.locator("#history polyline")).to_have_count(1)
        expect(page.get_by_role("img", name="NO2 at Getafe, the last 2 readings")).to_be_visible()

    def test_a_press_on_a_station_chooses_it(self, opened: OpenPage) -> None:
        page = opened.page
        x, y = position(page)
        page.locator("#map-view").click(position={"x": x, "y": y})
        expect(page.get_by_label("Station", exact=True)).to_have_value("28013002")
        expect(page.locator("#station-facts")).to_contain_text("501 m")

    def test_it_moves_by_pointer_and_by_keys(self, opened: OpenPage) -> None:
        page = opened.page
        view = page.locator("#map-view")
        place = view.bounding_box()
        assert place is not None
        middle = (place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        first = position(page)
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 40, middle[1] - 60, steps=4)
        page.mouse.up()
        wait_for_position(page, (first[0] + 40, first[1] - 60))
        view.focus()
        page.keyboard.press("ArrowRight")
        wait_for_position(page, (first[0] - 20, first[1] - 60))
        page.keyboard.press("+")
        page.get_by_role("button", name="Zoom out").click()
        wait_for_position(page, (first[0] - 20, first[1] - 60))
        page.keyboard.press("0")
        view.focus()
        page.keyboard.press("0")
        wait_for_position(page, first)

    def test_alerts_come_as_they_are_published(self, opened: OpenPage, broker: BrokerProcess) -> None:
        wait_until_live(opened.page)
        alert = {"alert": "NO2", "state": "begins", "name": "Getafe", "since": "2026-01-12T08:00:00Z", "windows": 3}
        publish(broker, alert | {"station": GETAFE.code, "peak": 231.5, "threshold": 180.0})
        expect(opened.page.locator("#alerts li")).to_contain_text(["Getafe NO2 above 180"])
        expect(opened.page.locator("#no-alerts")).to_be_hidden()


def position(page: Page) -> tuple[float, float]:
    """Returns the position of Aranjuez on the map."""
    moved = page.locator("[data-station='28013002']").get_attribute("transform")
    found = re.fullmatch(r"translate\((-?[\d.]+) (-?[\d.]+)\)", moved or "")
    assert found is not None, moved
    return float(found[1]), float(found[2])


def wait_for_position(page: Page, expected: tuple[float, float]) -> None:
    within = ".every((value, at) => Math.abs(value - expected[at]) < 2)"
    page.wait_for_function(
        "expected => document.querySelector(\"[data-station='28013002']\").getAttribute('transform')"
        f".match(/-?[\\d.]+/g).map(Number){within}",
        arg=list(expected),
    )


class TestSubscriptions:
    def test_a_filter_is_tried_against_the_live_flow(self, opened: OpenPage, broker: BrokerProcess) -> None:
        page = opened.page
        opened.go_to("subscriptions")
        page.get_by_label("Filter", exact=True).fill("NO2>60;kind==traffic")
        page.get_by_role("button", name="Subscribe").click()
        expect(page.locator("#try-count")).to_have_text("0 so far")
        publish(broker, {"NO2": 61, "kind": "traffic"}, {"NO2": 59, "kind": "traffic"}, {"NO2": 99, "kind": "traffic"})
        expect(page.locator("#try-count")).to_have_text("2 so far")
        expect(page.locator("#matching code")).to_contain_text(["NO2=99", "NO2=61"])
        page.locator("#matching").get_by_role("button", name="why?").first.click()
        expect(page.locator("#why-said")).to_contain_text("It matches.")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()

    def test_why_not_is_explained_constraint_by_constraint(self, opened: OpenPage) -> None:
        page = opened.page
        opened.go_to("subscriptions")
        page.get_by_label("Filter", exact=True).fill("NO2>60;kind==traffic")
        page.locator("#why-notification").fill('{"NO2": 41, "kind": "traffic"}')
        page.get_by_role("button", name="Explain").click()
        said = page.locator("#why-said")
        expect(said).to_contain_text("It does not match.")
        expect(said.get_by_role("img", name="fails")).to_have_count(1)
        expect(said.get_by_role("img", name="holds")).to_have_count(1)
        expect(said.locator("li").first).to_contain_text("NO2 is 41, not above 60")

    @pytest.mark.parametrize(("text", "column", "marked"), [("NO2>60;;a", 8, ";"), ("NO2>", 5, " "), ("a b", 3, "b")])
    def test_a_bad_filter_shows_its_error_at_the_column(
        self, opened: OpenPage, text: str, column: int, marked: str
    ) -> None:
        page = opened.page
        opened.expected = {"400 /v1/stream", "400 /v1/why"}
        opened.go_to("subscriptions")
        page.get_by_label("Filter", exact=True).fill(text)
        for press, place in (("Subscribe", "#try-error"), ("Explain", "#why-said")):
            page.get_by_role("button", name=press).click()
            expect(page.locator(f"{place} pre")).to_have_attribute("data-column", str(column))
            expect(page.locator(f"{place} mark")).to_have_text(marked, use_inner_text=False)
            expect(page.locator(f"{place} strong")).to_have_text(re.compile(r"F\d{3}"))
        assert opened.expected <= set(opened.faults)


class TestQueues:
    def test_messages_are_put_and_taken_by_hand(self, opened: OpenPage) -> None:
        page = opened.page
        opened.go_to("queues")
        page.get_by_label("New queue").fill("byhand")
        page.get_by_role("button", name="Create queue").click()
        expect(page.get_by_role("heading", name="byhand")).to_be_visible()
        page.get_by_label("Body in JSON").fill('{"NO2": 212}')
        page.get_by_role("button", name="Put", exact=True).click()
        expect(page.locator("#queue-put-said")).to_contain_text("1 accepted, fsync")
        expect(row_of(page, "byhand").nth(1)).to_have_text("1")
        page.get_by_role("button", name="Take one").click()
        expect(page.locator("#queue-taken code")).to_have_text('{"NO2":212}')
        page.get_by_role("button", name="Give back").click()
        expect(page.locator("#queue-taken")).to_have_text("Given back.")
        page.get_by_role("button", name="Take one").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(page.locator("#queue-taken")).to_have_text("Deleted.")
        page.get_by_role("button", name="Take one").click()
        expect(page.locator("#queue-taken")).to_have_text("No message is waiting.")

    def test_dead_letters_are_looked_at_and_redriven(self, opened: OpenPage, broker: BrokerProcess) -> None:
        with connect_sync(broker.native) as connection:
            queue = connection.queue("failing")
            queue.create(max_deliveries=1)
            queue.put([{"device": HOSTILE}])
            queue.release(queue.take(max=1))
            assert queue.take(max=1, wait_s=0.1) == []
        page = opened.page
        opened.go_to("queues")
        page.get_by_role("button", name="failing").click()
        page.get_by_role("button", name="Look inside").click()
        expect(page.locator("#queue-dead code")).to_have_text(json.dumps({"device": HOSTILE}, separators=(",", ":")))
        page.get_by_role("button", name="Redrive all").click()
        expect(page.locator("#queue-dead")).to_contain_text("None.")
        expect(row_of(page, "failing").nth(1)).to_have_text("1")

    def test_what_is_wrong_is_said(self, opened: OpenPage) -> None:
        page = opened.page
        opened.expected = {"400 /v1/queues/odd"}
        opened.go_to("queues")
        page.get_by_label("New queue").fill("odd")
        page.get_by_label("Filter (optional)").fill("NO2>")
        page.get_by_role("button", name="Create queue").click()
        expect(page.locator("#queue-new-error pre")).to_have_attribute("data-column", "5")
        assert opened.expected <= set(opened.faults)


def row_of(page: Page, queue: str) -> Locator:
    return page.locator("#queue-list tbody tr").filter(has_text=queue).locator("td")


class TestPath:
    def test_it_shows_the_layers_and_what_passes_them(self, opened: OpenPage, broker: BrokerProcess) -> None:
        page = opened.page
        opened.go_to("path")
        expect(page.locator("#layers > li")).to_have_count(4)
        expect(page.locator("[data-layer='matchers']")).to_contain_text("matcher-1")
        expect(page.locator("#rates polyline")).to_have_count(2)
        publish(broker, *({"n": n} for n in range(500)))
        expect(page.locator("#rates polyline")).to_have_count(2)
        expect(page.locator("#epoch")).to_contain_text(re.compile(r"epoch \d+, up"))

    def test_a_broker_in_one_process_is_scaled_too(self, opened: OpenPage) -> None:
        opened.go_to("path")
        for count in ("3", "1"):
            opened.page.get_by_label("Matchers").fill(count)
            opened.page.get_by_role("button", name="Scale").click()
            expect(opened.page.locator("#scaled")).to_contain_text("a probe measures the effect")
            expect(opened.page.locator("#scaled")).to_contain_text("out of order")
            expect(opened.page.locator("#scaled")).to_contain_text("duration")
            expect(opened.page.locator("#scaled")).to_contain_text("lost0duplicates0")
            expect(opened.page.locator("[data-layer='matchers'] .slices > li")).to_have_count(int(count))

    def test_a_typed_count_stays_when_the_layers_change(self, opened: OpenPage, broker: BrokerProcess) -> None:
        opened.go_to("path")
        matchers = opened.page.get_by_label("Matchers")
        expect(matchers).to_have_value("1")
        matchers.fill("2")
        matchers.fill("1")
        for count in (2, 1):
            httpx.post(f"{broker.http}/v1/scale", json={"matchers": count}, timeout=60).raise_for_status()
            expect(opened.page.locator("[data-layer='matchers'] .slices > li")).to_have_count(count)
            expect(matchers).to_have_value("1")
            expect(opened.page.get_by_label("Exit Points")).to_have_value("1")

    @pytest.mark.timeout(240)
    @pytest.mark.cluster
    def test_a_cluster_is_scaled_while_a_probe_watches(self, browser: Browser, tmp_path: Path) -> None:
        cluster = ClusterUp(tmp_path / "data")
        try:
            with OpenPage(browser, cluster.http) as opened:
                page = opened.page
                opened.go_to("path")
                expect(page.get_by_label("Matchers")).to_have_value("1")
                page.get_by_label("Matchers").fill("2")
                page.get_by_role("button", name="Scale").click()
                expect(page.locator("#scaled dl.done")).to_contain_text("epoch", timeout=60_000)
                told = dict(
                    zip(*(page.locator(f"#scaled {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True)
                )
                assert (told["lost"], told["duplicates"]) == ("0", "0")
                assert re.fullmatch(r"[\d.,]+ ms", told["longest delay"])
                expect(page.locator("[data-layer='matchers'] .slices li")).to_have_count(2)
        finally:
            cluster.end()


class TestFromOutside:
    def test_hostile_names_are_shown_and_not_run(self, opened: OpenPage, broker: BrokerProcess) -> None:
        page = opened.page
        wait_until_live(page)
        opened.go_to("subscriptions")
        page.get_by_label("Filter", exact=True).fill("*")
        page.get_by_role("button", name="Subscribe").click()
        expect(page.locator("#try-count")).to_contain_text("so far")
        hostile = {"name": HOSTILE, "zone": HOSTILE, "kind": HOSTILE, "area": HOSTILE, HOSTILE: HOSTILE}
        place = {"longitude": -3.9, "latitude": 40.2}
        publish(
            broker,
            hostile | place | {"station": HOSTILE, "time": HOSTILE, "NO2": 30.0},
            hostile | {"alert": HOSTILE, "state": HOSTILE, "since": HOSTILE},
            {"pipeline": HOSTILE, "query": HOSTILE, "batch": HOSTILE, "rows": HOSTILE},
        )
        expect(page.locator("#matching code")).to_have_count(3)
        expect(page.locator("#matching code").last).to_contain_text(HOSTILE)
        for part, shown in (("pipeline", "#jobs h2"), ("map", "#alerts li")):
            opened.go_to(part)
            expect(page.locator(shown)).to_contain_text([HOSTILE])
        expect(page.locator("#station option", has_text=HOSTILE)).to_have_count(1)
        page.get_by_label("Station", exact=True).select_option(label=HOSTILE)
        expect(page.locator("#station-facts")).to_contain_text(HOSTILE)
        assert page.evaluate("window.hacked === undefined && document.scripts.length === 1")
        assert page.locator("main img").count() == 0

    def test_values_of_any_kind_harm_nothing(self, opened: OpenPage, broker: BrokerProcess) -> None:
        page = opened.page
        wait_until_live(page)
        odd: dict[str, object] = {"station": True, "longitude": "west", "latitude": 1e308, "time": -1, "NO2": "high"}
        publish(
            broker,
            odd,
            odd | {"longitude": 1e300, "NO2": -1e300},
            {"alert": False},
            {"pipeline": 1, "query": 2, "batch": 3},
        )
        publish(broker, GETAFE.attributes() | {"time": "2026-01-12T08:00:00Z", "NO2": 9.0})
        expect(page.locator(f"[data-station='{GETAFE.code}'].level-1")).to_have_count(1)
        for part in PARTS:
            opened.go_to(part)


class TestToken:
    def test_it_is_asked_for_once_and_kept_for_the_tab(self, browser: Browser) -> None:
        with (
            BrokerProcess(environment={"TIDEGATE_TOKEN": TOKEN}) as broker,
            OpenPage(browser, broker.http) as opened,
        ):
            page = opened.page
            opened.expected = {f"401 /v1/{name}" for name in ("layers", "queues", "stream")}
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text("This broker requires a token")
            dialog.get_by_role("button", name="Not now").click()
            expect(page.locator("#state-text")).to_have_text("token required")
            expect(dialog).to_be_hidden()
            page.get_by_role("button", name="Enter token").click()
            dialog.get_by_label("Token").fill("a wrong token, and a long one")
            dialog.get_by_role("button", name="Continue").click()
            expect(dialog).to_contain_text("The token is wrong")
            dialog.get_by_label("Token").fill(TOKEN)
            dialog.get_by_role("button", name="Continue").click()
            wait_until_live(page)
            expect(dialog).to_be_hidden()
            page.reload()
            wait_until_live(page)
            with connect_sync(broker.native, token=TOKEN) as connection:
                connection.publish(GETAFE.attributes() | {"time": "2026-01-12T08:00:00Z", "NO2": 61.0})
            expect(page.locator(f"[data-station='{GETAFE.code}'].level-4")).to_have_count(1)
            expect(dialog).to_be_hidden()
            assert page.evaluate("localStorage.length") == 0

    def test_the_address_that_the_broker_prints_carries_it(self, browser: Browser) -> None:
        with BrokerProcess("--bind", "0.0.0.0") as broker:
            here = f"http://127.0.0.1:{broker.http_port}"
            with OpenPage(browser, f"{here}/#token={broker.token}") as opened:
                page = opened.page
                wait_until_live(page)
                expect(page.get_by_role("dialog")).to_be_hidden()
                assert page.url == f"{here}/"
                assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
                opened.go_to("path")
                page.get_by_label("Matchers").fill("2")
                page.get_by_role("button", name="Scale").click()
                expect(page.locator("#scaled")).to_contain_text("lost0duplicates0")
            with OpenPage(browser, here) as opened:
                opened.expected = {f"401 /v1/{name}" for name in ("layers", "queues", "stream")}
                page = opened.page
                page.get_by_role("dialog").get_by_role("button", name="Not now").click()
                # Like pasting the address into the tab, which then reloads nothing by itself.
                page.evaluate("token => { location.hash = `token=${token}` }", broker.token)
                wait_until_live(page)
                expect(page.get_by_role("button", name="Enter token")).to_be_hidden()

    def test_without_it_nothing_is_changed_and_the_page_says_why(self, browser: Browser) -> None:
        with BrokerProcess("--bind", "0.0.0.0", has_knowledge=True) as broker:
            here = f"http://127.0.0.1:{broker.http_port}"
            with connect_sync(f"tidegate://127.0.0.1:{broker.native_port}", token=broker.token) as connection:
                queue = connection.queue("work")
                queue.create(max_deliveries=1)
                queue.put([{"n": 1}])
                queue.release(queue.take(max=1))
                assert queue.take(max=1, wait_s=0.1) == []
            with OpenPage(browser, f"{here}/#token={broker.token}") as opened:
                page = opened.page
                opened.go_to("queues")
                page.get_by_role("button", name="work").click()
                expect(page.get_by_role("button", name="Redrive all")).to_be_enabled()
                # It restarts with another token, like every broker that generates its own.
                broker.kill()
                broker.start()
                page.get_by_role("dialog").get_by_role("button", name="Not now").click()
                page.get_by_label("Body in JSON").fill('{"n": 2}')
                page.get_by_role("button", name="Put", exact=True).click()
                page.get_by_role("button", name="Redrive all").click()
                page.get_by_label("New queue").fill("other")
                page.get_by_role("button", name="Create queue").click()
                for place in ("#queue-put-said", "#queue-dead", "#queue-new-error"):
                    expect(page.locator(place)).to_contain_text("the token is wrong")
                    expect(page.locator(place)).to_contain_text("press “Enter token” above")
                opened.go_to("path")
                page.get_by_label("Matchers").fill("2")
                page.get_by_role("button", name="Scale").click()
                expect(page.locator("#scaled")).to_contain_text("the token is wrong")
                opened.go_to("knowledge")
                page.get_by_role("button", name="Ask").click()
                expect(page.locator("#answer")).to_contain_text("the token is wrong")
                opened.faults = [fault for fault in opened.faults if not fault.startswith("401 ")]
            with connect_sync(f"tidegate://127.0.0.1:{broker.native_port}", token=broker.token) as connection:
                assert (connection.queue("work").stats()["messages"], len(connection.queues())) == (0, 1)
                assert connection.queue("work").stats()["dead_letters"] == 1


class TestQueueAlarms:
    def test_a_banner_tells_of_a_queue_before_it_is_full_and_while_it_refuses(self, browser: Browser) -> None:
        with BrokerProcess() as broker, OpenPage(browser, broker.http) as opened, connect_sync(broker.native) as sync:
            page, banner = opened.page, opened.page.locator("#queue-alarms")
            wait_until_live(page)
            expect(banner).to_be_hidden()
            ring = {"filter": "n", "policy": "drop-oldest", "physical_queues": 1}
            sync.queue("ring").create(**ring, messages_max=1)
            sync.queue("audit").create(filter="n", messages_max=10, physical_queues=1, block_s=3.0)
            sync.publish([{"n": n} for n in range(9)])
            expect(banner).to_contain_text("Queue audit is 90 % full. When it is full, it holds back its publishers.")
            with pytest.raises(Overloaded, match=r"L611.*'audit'"):
                sync.publish([{"n": n} for n in range(4)])
            expect(banner).to_contain_text(
                "Queue audit is 100 % full and no longer stores what does not fit: 3 refused."
            )
            expect(banner).not_to_contain_text("ring")
            banner.get_by_role("link", name="Show queues").click()
            row = page.locator("#queue-list tr", has_text="audit")
            expect(row.locator(".over")).to_have_text("100 %")
            row.get_by_role("button").click()
            expect(page.locator("#queue-facts")).to_contain_text("waits 3 s, then refuse")
            PICTURES.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=PICTURES / "queue-alarm.png", full_page=True)
            while messages := sync.queue("audit").take(max=100, wait_s=0):
                sync.queue("audit").delete(messages)
            expect(banner).to_be_hidden()


class TestWhatWasBefore:
    def test_queues_and_the_broker_remember_it_for_a_page_that_opens_later(self, browser: Browser) -> None:
        hours = 200
        with BrokerProcess() as broker:
            with connect_sync(broker.native) as connection:
                for name, settings in REMEMBERED.items():
                    connection.queue(name).create(**settings, **LATEST)
                stream = readings(1, START, STEP)
                for _ in range(hours):
                    connection.publish(list(islice(stream, len(STATIONS))))
                alert = {"alert": "NO2", "station": "1", "name": "Before", "state": "begins"}
                connection.publish([alert | {"threshold": 180.0, "windows": 3, "peak": 200.0}])
                for batch in range(2):
                    job = {"pipeline": "air", "query": "before", "batch": batch, "rows": 5, "rows_s": 1.5}
                    connection.publish([job | {"behind": 0, "batch_ms": 2500}])
                    time.sleep(1.5)
            with OpenPage(browser, broker.http) as opened:
                page = opened.page
                # A full queue makes room for more than the next message.
                week = re.compile(r"NO2 at Alcalá de Henares, the last 1[56]\d readings")
                expect(page.get_by_role("img", name=week)).to_be_visible()
                last_hour = START + (hours - 1) * STEP
                expect(page.locator("#history text").last).to_have_text(f"{last_hour:%m-%d %H:%M}")
                expect(page.locator(".station[class*='level-']")).to_have_count(len(STATIONS))
                expect(page.locator("#alerts")).to_contain_text("Before")
                opened.go_to("pipeline")
                expect(page.locator("#jobs h2")).to_have_text("air · before")
                expect(page.locator("#jobs polyline")).to_have_count(2)
                expect(page.locator("#jobs dl")).to_contain_text("duration2.5 s")
                opened.go_to("path")
                expect(page.locator("#rates polyline")).to_have_count(2)
                # Accepted within one second, before the page looked.
                highest = max(
                    rate["accepted"]
                    for rate in httpx.get(f"{broker.http}/v1/rates", trust_env=False, timeout=60).json()["rates"]
                )
                assert highest > 100
                top = page.locator("#rates text").all_text_contents()
                assert any(float(text.replace(",", "")) >= highest for text in top if ":" not in text)


def test_it_comes_back_with_the_broker(browser: Browser) -> None:
    with BrokerProcess() as broker, OpenPage(browser, broker.http) as opened:
        page = opened.page
        wait_until_live(page)
        broker.kill()
        expect(page.locator("#state-text")).to_have_text("no answer")
        expect(page.locator("#part-map")).to_have_attribute("data-live", "false")
        broker.start()
        wait_until_live(page)
        publish(broker, GETAFE.attributes() | {"time": "2026-01-12T08:00:00Z", "NO2": 61.0})
        expect(page.locator(f"[data-station='{GETAFE.code}'].level-4")).to_have_count(1)


class TestKnowledge:
    def test_queries_are_answered_and_stay_open(self, browser: Browser) -> None:
        with BrokerProcess(has_knowledge=True) as broker, OpenPage(browser, broker.http) as opened:
            page = opened.page
            opened.go_to("knowledge")
            update(broker, "INSERT DATA { <http://e/hall> <http://e/is> 'warm <b>&' }")
            page.get_by_role("button", name="Ask").click()
            expect(page.locator("#answer tbody tr")).to_have_count(1)
            expect(page.locator("#answer")).to_contain_text("warm <b>&")
            page.get_by_role("button", name="Keep open").click()
            kept = page.locator("#persistent")
            expect(kept).to_contain_text("open")
            update(broker, "INSERT DATA { <http://e/attic> <http://e/is> 'cold' }")
            expect(kept.locator("tbody tr")).to_have_count(2)
            expect(kept).to_contain_text("change 1: 1 added, 0 removed")
            update(broker, "DELETE WHERE { <http://e/hall> ?p ?o }")
            expect(kept.locator("tbody tr")).to_have_count(1)
            kept.get_by_role("button", name="End").click()
            expect(kept).to_contain_text("ended")
            page.get_by_label("SPARQL").fill("ASK { ?s ?p 'cold' }")
            page.get_by_role("button", name="Keep open").click()
            expect(kept).to_contain_text("Yes.")
            update(broker, "DELETE WHERE { ?s ?p ?o }")
            expect(kept).to_contain_text("No.")
            page.get_by_label("SPARQL").fill("SELECT nonsense")
            page.get_by_role("button", name="Ask").click()
            expect(page.locator("#answer .error")).to_contain_text("K1")
            opened.expected = {"400 /v1/sparql"}

    def test_programs_tell_how_they_pace_their_checks(self, opened: OpenPage, broker: BrokerProcess) -> None:
        with opened.page.expect_response(re.compile("filter=persistent_queries")):
            opened.go_to("knowledge")
        expect(opened.page.locator("#control")).to_be_hidden()
        state = {
            "interval_s": 2.5,
            "ast_s": 2.25,
            "rbt_s": 0.25,
            "checks": 12,
            "detections": 1,
            "losses": 3,
            "changes": 4,
        }
        publish(broker, {"persistent_queries": 308, **state})
        expect(opened.page.locator("#control")).to_contain_text("308")
        expect(opened.page.locator("#control")).to_contain_text("RBT250 ms")

    def test_it_is_calm_where_there_is_none(self, opened: OpenPage) -> None:
        page = opened.page
        opened.go_to("knowledge")
        opened.expected = {"404 /v1/sparql"}
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#answer")).to_have_text("This broker has no knowledge base.")


def update(broker: BrokerProcess, text: str) -> None:
    headers = {"Content-Type": "application/sparql-update"}
    httpx.post(
        f"{broker.http}/v1/sparql", content=text, headers=headers, trust_env=False, timeout=60
    ).raise_for_status()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_fits_and_has_its_picture_taken(
    browser: Browser, broker: BrokerProcess, theme: str, size: tuple[int, int]
) -> None:
    with OpenPage(browser, broker.http, size=size, theme=theme) as opened:
        page = opened.page
        wait_until_live(page)
        publish(broker, *islice(readings(1, START, STEP), 24 * len(STATIONS)))
        publish(
            broker,
            {
                "pipeline": "air-quality",
                "query": "readings",
                "batch": 1,
                "rows": 28,
                "rows_s": 9.5,
                "behind": 0,
                "batch_ms": 412,
            },
        )
        expect(page.locator(".station[class*='level-']")).to_have_count(len(STATIONS))
        for part in PARTS:
            opened.go_to(part)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            if part in FIRST_CONTENT:
                expect(page.locator(FIRST_CONTENT[part]).first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], part
            PICTURES.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=PICTURES / f"{part}-{theme}-{size[0]}.png", full_page=True)


def test_everything_has_a_name_and_can_be_reached_by_keys(opened: OpenPage) -> None:
    page = opened.page
    expect(page.locator("#part-map")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("#map-view")).to_be_focused()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button")]
            .filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim())
            .map((each) => each.outerHTML)"""
    )
    assert nameless == []
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
