"""What is published beside the package: the site's pages and links, and the workflows that test and build it."""

import logging
import re
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest
import yaml
from test_lessons import LESSONS, ROOT, each_lesson, prose, read
from test_readme import PAGES, anchors

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


class Loader(yaml.SafeLoader):
    """Passes over the names of Python that mkdocs looks up."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def leaves(nav) -> dict[str, str]:
    """The title of each page of a navigation."""
    found = {}
    for title, below in (pair for entry in nav for pair in entry.items()):
        found |= {below: title} if isinstance(below, str) else leaves(below)
    return found


def test_the_site_has_every_page():
    expected = {path.relative_to(ROOT).as_posix() for path in [*PAGES, *LESSONS]}
    assert set(leaves(SITE["nav"])) == expected


@each_lesson
def test_links_of_a_lesson_lead_to_files_and_headings(path):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(read(path))):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.is_file(), target
        if linked.suffix == ".ipynb":  # Jupyter's own names of headings
            headings = re.findall(r"^#+ (.+)", prose(read(linked)), re.MULTILINE)
            assert not anchor or anchor in [heading.replace(" ", "-") for heading in headings], target
        else:
            assert not anchor or anchor in anchors(linked.read_text()), target


@pytest.fixture
def lead():
    """The hook that points a page's links at pages, for a site of two lessons and a page."""
    spec = spec_from_file_location("site_hook", ROOT / SITE["hooks"][0])
    hook = module_from_spec(spec)
    spec.loader.exec_module(hook)
    addresses = {
        "notebooks/01_a.ipynb": "01_a.html",
        "notebooks/02_b.ipynb": "02_b.html",
        "docs/c.md": "../docs/c.html",
    }
    pages = {uri: SimpleNamespace(src_uri=uri, url_relative_to=lambda page, to=to: to) for uri, to in addresses.items()}
    files = SimpleNamespace(get_file_from_path=pages.get)
    return lambda html, uri="notebooks/01_a.ipynb": hook.on_page_content(
        html, SimpleNamespace(file=pages[uri]), {}, files
    )


def test_a_lessons_links_lead_to_the_sites_pages(lead, caplog):
    assert lead('<a href="02_b.ipynb#What-it-is">') == '<a href="02_b.html#what-it-is">'
    assert lead('<a href="../docs/c.md">') == '<a href="../docs/c.html">'
    assert lead('<a href="#What-it-is">') == '<a href="#what-it-is">'
    for kept in ('<a href="https://a.org/x.ipynb">', '<a href="#the-technique">', '<a id="x" href="mailto:a@b.org">'):
        assert lead(kept) == kept
    assert lead('<a href="02_b.ipynb">', "docs/c.md") == '<a href="02_b.ipynb">', "mkdocs does it"
    assert not caplog.records
    assert lead('<a href="03_none.ipynb">') == '<a href="03_none.ipynb">'
    (warned,) = caplog.records  # with --strict, mkdocs fails at one
    assert warned.levelno == logging.WARNING and warned.name.startswith("mkdocs.") and "03_none" in warned.getMessage()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_make_what_there_is(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert all("timeout-minutes" in job for job in jobs)
    used = [step["uses"] for step in steps if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", action) for action in used)
    made = re.findall(r"make (?:--jobs \d+ )?([\w-]+)", " ".join(step.get("run", "") for step in steps))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made and set(made) <= set(targets)


def test_the_same_is_run_on_ci_and_on_github():
    made = lambda text: re.findall(r"make (?:--jobs \d+ )?[\w-]+", text)
    (tests,) = (path for path in WORKFLOWS if path.stem == "tests")
    assert sorted(made((ROOT / ".ci" / "run").read_text())) == sorted(made(tests.read_text()))
