"""The report, as a real browser shows it."""

import itertools
import shutil
from pathlib import Path

import pytest
from conftest import predicted_sizes

from effgpu import units
from effgpu.__main__ import main
from effgpu.ablation import Ablation
from effgpu.comparison import Comparison
from effgpu.course import report
from effgpu.course.runner import Outcome, Picture
from effgpu.measuring.device import Device
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.results import save

GPU = Device(
    "NVIDIA H200",
    "cuda",
    150_754_820_096,
    16,
    132,
    (9, 0),
    "570.86.15",
    {"bf16": "yes"},
    {"torch": "2.8.0", "cuda": "12.8"},
)
CPU = Device("AMD EPYC <7B13>", "cpu", 2**34, 2, versions={"python": "3.13.1", "torch": "2.8.0"})
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def compare(device: Device, name: str = "mixed_precision") -> Comparison:
    """One variant for each verdict, with predictions, and with energy if the device is a GPU."""

    def measure(label: str, seconds: float, peak: int, wobble: float = 0.0) -> Measurement:
        turns = tuple((seconds * (1 + wobble * (-1) ** n * n / 16),) * 2 for n in range(16))
        joules = 300 * seconds if device.kind == "cuda" else None
        return Measurement(label, turns, device, 32, "samples", peak, peak + 2**20, joules)

    rows = [
        measure("fp32", 0.0412, 9 * 2**30),
        measure("bf16", 0.0171, 5 * 2**30, 0.02),
        measure("tf32, and cudnn.benchmark", 0.0409, 9 * 2**30, 0.1),
        measure("fp64", 0.0899, 18 * 2**30, 0.01),
        measure("fp32 again", 0.0412, 9 * 2**30),
        Measurement("fp128", (), device, 32, "samples", failed=OUT_OF_MEMORY),
    ]
    predicted = {"bf16": {"time": 0.5, "memory": 0.55}, "fp64": {"energy": 2.0}, "fp128": {"time": 4.0}}
    return Comparison(name, tuple(rows), predicted)


@pytest.fixture(scope="module")
def page_of_two_machines(tmp_path_factory) -> Path:
    """What `effgpu report` makes of two results files."""
    folder = tmp_path_factory.mktemp("report")
    files = [
        save([compare(device), compare(device, "pinned_memory")], folder / f"{device.slug}.json")
        for device in (GPU, CPU)
    ]
    assert main(["report", *map(str, files), "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as session:
        launched = session.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_phone_and_desktop_in_light_and_dark(browser, page_of_two_machines, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    requested, errors = [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(page_of_two_machines.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {url for url in requested if not url.startswith("data:")} == {page_of_two_machines.as_uri()}
    assert errors == []
    assert page.locator("img").count() == 4
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0 && image.alt)")
    page.close()


def test_a_wide_table_scrolls_in_its_own_box(browser, page_of_two_machines):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(page_of_two_machines.as_uri())
    box = page.locator(".scroll").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    box.focus()  # a keyboard reaches it
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.scroll').scrollLeft > 0")
    page.close()


def test_a_cpus_times_are_called_a_cpus(page_of_two_machines):
    gpu, cpu = page_of_two_machines.read_text().split('<section class="machine">')[1:]
    for text in ("AMD EPYC &lt;7B13&gt; (CPU, 2 cores)", "not a GPU’s", "of the host"):
        assert text in cpu and text not in gpu
    for text in ("NVIDIA H200", "140 GiB", "9.0", "570.86.15", "torch 2.8.0"):
        assert text in gpu
    for section, device in ((gpu, GPU), (cpu, CPU)):
        assert units.html_table(*compare(device).table()) in section, "the table that the lesson shows"


def test_what_failed_is_named_and_nothing_in_it_is_markup(tmp_path):
    bad = Outcome("01_bad", "Bad", failure="cell [1] '<script>': ValueError: <b>")
    page = report.write(tmp_path / "report.html", [report.Section(GPU, (bad,))]).read_text()
    assert "01_bad" in page and "&lt;script&gt;" in page and "<script>" not in page and "ValueError: &lt;b&gt;" in page
    assert "There are no comparisons" in page


def lesson(name: str, seconds: float, peak: int, **fields) -> Outcome:
    """A lesson whose main comparison has one variant; its baseline takes a second and 1000 bytes."""
    measured = [("old", 1.0, 1000), ("new", seconds, peak)]
    rows = tuple(
        Measurement(label, ((seconds, seconds),) * 15, CPU, peak_allocated=peak) for label, seconds, peak in measured
    )
    return Outcome(name, f"Title {name}: more", (Comparison(name, rows, **fields),))


LESSONS = [
    lesson("01_slower", 1.5, 1005),
    lesson("02_faster", 0.7, 1000),
    lesson("03_smaller", 1.2, 400),
    lesson("04_equal", 1.0, 1000),
    lesson("05_fastest", 0.2, 1000, predicted={"new": {"time": 0.3}}),
    lesson("06_slowest", 4.0, 1000),
    Outcome("07_silent", "Silent"),
]


@pytest.fixture(scope="module")
def page_of_lessons(tmp_path_factory) -> Path:
    return report.write(tmp_path_factory.mktemp("lessons") / "report.html", [report.Section(CPU, tuple(LESSONS))])


def test_the_page_begins_with_what_pays_and_what_does_not(browser, page_of_lessons):
    page = browser.new_page()
    page.goto(page_of_lessons.as_uri())
    assert page.locator("h1").inner_text() == "What pays on this machine"
    groups = [heading.split()[1:4] for heading in page.locator(".verdict").all_inner_texts()]
    assert [" ".join(words) for words in groups] == [
        *("Pays less time", "A trade less", "No difference the", "Does not pay")
    ]
    links = page.locator(".overview a")
    assert [text.split()[0] for text in links.all_inner_texts()] == ["05", "02", "03", "04", "01", "06"]
    for link in links.all():
        assert page.locator(link.get_attribute("href")).count() == 1
    first = " ".join(page.locator(".overview li").first.inner_text().split())
    assert first == (
        "05 Title 05_fastest new against old Time 5.00 × faster [5.00, 5.00] predicted 3.33 × faster Peak memory 0 %"
    )
    assert "Without a result: 07 Silent. They need a GPU" in page.locator(".silent").inner_text()
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_bar_lies_left_of_the_baseline_for_less_and_right_for_more(browser, page_of_lessons, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(page_of_lessons.as_uri())
    place = """(e, child) => {
        const [own, bar] = [e.querySelector(child), e].map(each => each?.getBoundingClientRect());
        return own && [own.left, own.right].map(x => Math.round(50 * (x - bar.left) / bar.width) / 25);
    }"""
    bars = page.locator(".overview .bar")
    assert bars.count() == 12  # time and memory of six lessons
    assert [bars.nth(n).evaluate(place, ".fill") for n in (0, 4, 5, 6)] == [[0.2, 1], [1, 1.2], [0.4, 1], [1, 1]]
    assert bars.nth(10).evaluate(place, ".fill") == [1, 2] and page.locator(".beyond").count() == 1
    left, right = bars.first.evaluate(place, ".predicted")
    assert (left + right) / 2 == pytest.approx(0.3, abs=0.05)
    page.close()


def test_what_a_lesson_predicts_at_a_gpus_size_is_in_the_page_and_named_so(tmp_path):
    sizes = predicted_sizes(20 * 2**30, 2**30)
    section = report.Section(CPU, (lesson("01_some", 1.0, 400, full_size=sizes),))
    page = report.write(tmp_path / "report.html", [section]).read_text()
    assert "4.00 × faster, 20.0 → 1.00 GiB on a T4, so that it fits (predicted)" in page
    assert "T4, predicted" in page and "<td>4.00 × faster [3.33, 5.00]</td>" in page


def test_a_long_table_is_folded_and_an_ablation_has_a_row_for_each_switch_above_it(tmp_path, make_measurement):
    switches = "abcd"
    labels = [" + ".join(on) for n in range(5) for on in itertools.combinations(switches, n)]
    ablation = Ablation(
        "01_all", tuple(make_measurement(label or "none", 1 - 0.01 * n) for n, label in enumerate(labels))
    )
    section = report.Section(CPU, (Outcome("01_all", "All", (ablation,)), lesson("02_short", 0.7, 1000)))
    page = report.write(tmp_path / "report.html", [section]).read_text()
    _, long, short = page.split("<article")
    assert "on top of the rest" in long.partition("<details>")[0] and "a + b + c" not in long.partition("<details>")[0]
    assert "All 16 variants" in long and "a + b + c + d" in long.partition("<details>")[2]
    assert "<details>" not in short and "<table>" in short


def test_stored_results_are_gathered_by_lesson(monkeypatch):
    listed = [Outcome("02_dataloader", "DataLoader workers", about="Load ahead.")]
    monkeypatch.setattr(report.runner, "read_lessons", lambda folder: listed)
    monkeypatch.setattr(report, "_draw", lambda comparison: Picture("", "", comparison.name))
    section = report.from_results([compare(CPU, name) for name in ("02_tokenise", "02_dataloader", "my_own", "other")])
    found = [(outcome.name, outcome.title, [c.name for c in outcome.comparisons]) for outcome in section.outcomes]
    lesson = ("02_dataloader", "DataLoader workers", ["02_tokenise", "02_dataloader"])
    assert found == [lesson, ("my_own", "my_own", ["my_own"]), ("other", "other", ["other"])]
    assert section.outcomes[0].headline.comparison.name == "02_dataloader"
