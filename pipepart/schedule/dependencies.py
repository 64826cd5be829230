"""The compute actions of a schedule as a graph of dependencies, and a linear order of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import COMPUTE, Action, Edges, Schedule

__all__ = ["ActionGraph", "Numbered"]


@dataclass(frozen=True)
class Numbered:
    """The compute actions of all stages, numbered stage by stage in their order."""

    actions: tuple[Action, ...]
    stage: tuple[int, ...]
    first: tuple[int, ...]
    """Number of the first action of each stage, and at the end the number of all actions."""
    number: Mapping[str, Sequence[int]]
    """Per kind a flat table over (chunk, micro-batch): the number of that action, -1 where there is none.

    ``back`` holds ``B`` or ``I``, whichever there is.
    """

    @staticmethod
    def of(schedule: Schedule) -> Numbered:
        """Number the actions of a schedule. Raises an error for one that does not compute, is misplaced, or occurs twice."""
        chunks, microbatches, placement = schedule.chunks, schedule.microbatches, schedule.placement
        number = {kind: [-1] * (chunks * microbatches) for kind in (*COMPUTE, "back")}
        back = number["back"]
        actions: list[Action] = []
        stage_of: list[int] = []
        first = [0]
        for stage, mine in enumerate(schedule.actions):
            for n, action in enumerate(mine, len(actions)):
                kind, chunk, k = action.kind, action.chunk, action.microbatch
                if kind not in COMPUTE or not 0 <= chunk < chunks or not 0 <= k < microbatches:
                    raise ScheduleError(
                        f"{schedule.name}: stage {stage} has {action}; expected F, B, I or W of chunks 0..{chunks - 1} "
                        f"and micro-batches 0..{microbatches - 1}"
                    )
                if placement[chunk] != stage:
                    raise ScheduleError(
                        f"{schedule.name}: stage {stage} has {action}, but chunk {chunk} is on stage "
                        f"{placement[chunk]}; move the action there"
                    )
                at = chunk * microbatches + k
                if number[kind][at] >= 0:
                    raise ScheduleError(f"{schedule.name}: stage {stage} does {action} twice")
                number[kind][at] = n
                if kind == "B" or kind == "I":
                    back[at] = n
            actions += mine
            stage_of += [stage] * len(mine)
            first.append(len(actions))
        return Numbered(tuple(actions), tuple(stage_of), tuple(first), number)


@dataclass(frozen=True)
class ActionGraph:
    """The numbered compute actions of all stages, with their dependencies.

    ``needs[n]`` are the numbers of the actions whose results action ``n`` uses; ``users[n]`` is the reverse.
    """

    schedule: Schedule
    edges: Edges
    actions: tuple[Action, ...]
    stage: tuple[int, ...]
    first: tuple[int, ...]
    """Number of the first action of each stage, and at the end the number of all actions."""
    needs: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(schedule: Schedule, edges: Edges, numbered: Numbered | None = None) -> ActionGraph:
        """The graph of a schedule. Raises an error if a needed action is in no list."""
        numbered = Numbered.of(schedule) if numbered is None else numbered
        actions, number = numbered.actions, numbered.number
        chunks, microbatches = schedule.chunks, schedule.microbatches
        sources: list[list[int]] = [[] for _ in range(chunks)]
        targets: list[list[int]] = [[] for _ in range(chunks)]
        for source, target in sorted(edges.forward):
            sources[target].append(source)
        for source, target in sorted(edges.backward):
            targets[source].append(target)
        ahead, back, inputs = number["F"], number["back"], number["I"]
        needs: list[tuple[int, ...]] = []
        users: list[list[int]] = [[] for _ in actions]
        for n, action in enumerate(actions):
            kind, chunk, k = action.kind, action.chunk, action.microbatch
            if kind == "F":
                found = tuple([ahead[source * microbatches + k] for source in sources[chunk]])
            elif kind == "W":
                found = (inputs[chunk * microbatches + k],)
            else:
                found = (
                    ahead[chunk * microbatches + k],
                    *[back[target * microbatches + k] for target in targets[chunk]],
                )
            if -1 in found:
                raise ScheduleError(_missing(schedule, action, sources[chunk], targets[chunk], found.index(-1)))
            for need in found:
                users[need].append(n)
            needs.append(found)
        if any(len(others) > 1 for others in (*sources, *targets)):
            for n, mates in enumerate(users):  # nearest first: the order in which messages leave
                here = actions[n].chunk
                mates.sort(key=lambda user, here=here: (abs(actions[user].chunk - here), user))  # type: ignore[misc]
        return ActionGraph(
            schedule, edges, actions, numbered.stage, numbered.first, tuple(needs), tuple(map(tuple, users))
        )

    def linear_order(self) -> list[int]:
        """One order of all actions that keeps the order of each stage and all dependencies; an error if there is none.

        The order is breadth first, so that it resembles time: stages advance together as far as they can.
        """
        starts = set(self.first)
        waiting = [len(need) + (n not in starts) for n, need in enumerate(self.needs)]
        ready = deque(n for n, count in enumerate(waiting) if not count)
        order: list[int] = []
        while ready:
            n = ready.popleft()
            order.append(n)
            following = self.users[n] if n + 1 in starts else (*self.users[n], n + 1)
            for user in following:
                waiting[user] -= 1
                if not waiting[user]:
                    ready.append(user)
        if len(order) < len(self.actions):
            raise ScheduleError(self.explain_stall(set(order)))
        return order

    def explain_stall(self, done: set[int]) -> str:
        """Error text: the next action of each stage, and the action that it waits for."""
        lines = [f"{self.schedule.name}: this order cannot be carried out; every unfinished stage waits for another:"]
        for stage in range(self.schedule.stages):
            stuck = next((n for n in range(self.first[stage], self.first[stage + 1]) if n not in done), None)
            if stuck is None:
                continue
            for need in self.needs[stuck]:
                if need in done:
                    continue
                where = "the same stage, later" if self.stage[need] == stage else f"stage {self.stage[need]}"
                lines.append(f"  stage {stage}: {self.actions[stuck]} waits for {self.actions[need]} ({where})")
        return "\n".join(lines)


def _missing(schedule: Schedule, action: Action, sources: Sequence[int], targets: Sequence[int], at: int) -> str:
    """Error text for an action whose need number ``at`` is in no stage's list."""
    needs = {"F": [("F", source) for source in sources], "W": [("I", action.chunk)]}
    back = [("F", action.chunk), *(("B", target) for target in targets)]
    lacking = Action(*needs.get(action.kind, back)[at], action.microbatch)
    return (
        f"{schedule.name}: {action} on stage {schedule.placement[action.chunk]} needs {lacking}, which is in no stage's "
        f"list; add it to the list of stage {schedule.placement[lacking.chunk]}"
    )
