"""Loops in a step, each round of which calls the same operations: one call may do for all.

The events show the rounds, the code what the loop goes through. Layers, each with weights of its own, are left out.
"""

import ast
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch

from effgpu.attaching.sites import Site, called_name, once_a_file, parse
from effgpu.diagnosing.lists import Updates, foreach_names, is_average
from effgpu.diagnosing.observed import Loop
from effgpu.predicting.kinds import OTHER
from effgpu.predicting.timeline import FORWARD, GRADIENTS, Event

_FEWEST = 8  # rounds: fewer may be scales, heads or crops
_TRAINS = ("backward", "grad", "step")


def find_loop(events: Iterable[Event]) -> Loop | None:
    """The loop with most of the CPU's calls in a step's forward pass, if more than half of them are in one."""
    usual = (event for event in events if event.phase == FORWARD and not (event.evaluating or event.lasting))
    forward = [event for event in usual if event.kernels]
    inside: dict[tuple[str, range], list[tuple[Site, Event]]] = {}
    for event in forward:
        sites = dict.fromkeys(each._replace(inside="") for each in (event.site, event.inner) if each)
        for site in sites:
            for lines in _loops(site.file):
                if site.line in lines:
                    inside.setdefault((site.file, lines), []).append((site, event))
    found, all_calls = [], sum(event.calls for event in forward)
    for seen in inside.values():
        done = [(site.line, *(kernel.name for kernel in event.kernels)) for site, event in seen]
        if (rounds := _count_rounds(done)) < _FEWEST:
            rounds = _count_branching(done)
        calls: Counter[Site] = Counter()
        for site, event in seen:
            calls[site] += event.calls
        if rounds >= _FEWEST and calls.total() > all_calls / 2:
            found.append(Loop(calls.most_common(1)[0][0], rounds, calls.total() / all_calls))
    return max(found, key=lambda loop: loop.share, default=None)


def find_updates(events: Sequence[Event]) -> tuple[Updates, ...]:
    """The innermost loops over weights, gradients or buffers, where lists would do."""
    lasting = [event for event in events if event.lasting and not event.evaluating]
    sites = dict.fromkeys(site._replace(inside="") for event in lasting for site in (event.inner, event.site) if site)
    loops = {(site.file, lines): site for site in sites for lines in _loops(site.file) if site.line in lines}
    found: list[Updates] = []
    for (file, lines), site in sorted(loops.items(), key=lambda item: len(item[0][1])):
        if not any(each.site.file == file and each.site.line in lines for each in found):
            loop = Updates(site, lines)
            found += _look_at(loop, [run for inside, run in loop.split(events) if inside])
    return tuple(found)


def _look_at(loop: Updates, runs: Iterable[list[Event]]) -> list[Updates]:
    """The loop with what its runs do, if one is of several rounds, and none multiplies matrices or normalises."""
    runs = [[event for event in run if event.kernels] for run in runs]
    done = [event for run in runs for event in run]
    names = dict.fromkeys(kernel.name for event in done for kernel in event.kernels)
    known = tuple(name for name in names if all(hasattr(torch, each) for each in foreach_names(name)))
    lines: Counter[Site] = Counter()
    rounds = 0
    for run in runs:
        by_line: dict[Site, list[str]] = {loop.find(event): [] for event in run if event.lasting}
        for event in run:
            if (site := loop.find(event)) in by_line and (name := event.kernels[0].name) in known:
                by_line[site].append(name)  # what is made of them, too: it tells two products of a round apart
        most = max(map(_count_rounds, by_line.values()), default=0)
        if most >= _FEWEST:
            rounds += most
            lines.update({site: len(each) for site, each in by_line.items()})
    if not rounds or any(kernel.kind != OTHER for event in done for kernel in event.kernels):
        return []
    averages = is_average(set(names)) and all(event.lasting != GRADIENTS for event in done)
    ((site, _),) = lines.most_common(1)
    return [loop._replace(site=site, rounds=rounds, calls=len(done), names=known, averages=averages)]


def _count_rounds(done: Sequence[Hashable]) -> int:
    """How often a sequence repeats how it ends, for half of it or more: a first round may do something else, too."""
    back = done[::-1]
    borders, period = [0], len(done)  # of each beginning: how much of it is also its end
    for length, each in enumerate(back[1:], start=2):
        border = borders[-1]
        while border and each != back[border]:
            border = borders[border - 1]
        borders.append(border + (each == back[border]))
        if 2 * length >= len(done):
            period = min(period, length - borders[-1])
    return round(len(done) / period)


def _count_branching(done: Sequence[Hashable]) -> int:
    """How often most kinds of work are done, where an `if` in each round decides on others; 0 where one is rare."""
    counts = sorted(Counter(done).values(), reverse=True)
    return Counter(counts).most_common(1)[0][0] if counts[-1] >= _FEWEST else 0


@once_a_file
def _loops(file: str) -> list[range]:
    """The lines of each loop of a file, but for those that train, and those that call what they go through."""
    found = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.For):
            targets, body = [node.target], node.body
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            targets, body = [each.target for each in node.generators], [node.elt]
        else:
            continue
        names = {name for target in targets for name in _names(target)}
        calls = [each for part in body for each in ast.walk(part) if isinstance(each, ast.Call)]
        if not any(called_name(call) in _TRAINS or _is_one_of(call.func, names) for call in calls):
            found.append(range(node.lineno, node.end_lineno + 1))
    return found


def _is_one_of(function: ast.expr, names: set[str]) -> bool:
    """Whether a function is what one of these names stands for, or is found by it; a tensor's methods are not."""
    return bool(names & _names(function)) and not hasattr(torch.Tensor, getattr(function, "attr", ""))


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
