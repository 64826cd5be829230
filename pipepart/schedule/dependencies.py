"""What waits for what: the compute actions of a schedule as a graph, and the orders that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipepart.errors import ScheduleError
from pipepart.schedule.actions import Action, Edges, Schedule

__all__ = ["ActionGraph"]

Key = tuple[str, int, int]


def _needs(action: Action, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[Key]:
    """The actions whose results an action uses; ``B`` stands for whichever of ``B`` and ``I`` there is."""
    chunk, k = action.chunk, action.microbatch
    if action.kind == "F":
        return [("F", source, k) for source in sources[chunk]]
    if action.kind == "W":
        return [("I", chunk, k)]
    return [("F", chunk, k), *(("B", target, k) for target in targets[chunk])]


@dataclass(frozen=True)
class ActionGraph:
    """The compute actions of all stages, numbered stage by stage in their order, with what each of them needs.

    ``needs[n]`` are the numbers of the actions whose results action ``n`` uses; ``users[n]`` the reverse.
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
    def of(schedule: Schedule, edges: Edges) -> ActionGraph:
        actions: list[Action] = []
        stage_of: list[int] = []
        first = [0]
        number: dict[Key, int] = {}
        for stage, mine in enumerate(schedule.actions):
            for action in mine:
                key = (action.kind, action.chunk, action.microbatch)
                if key in number:
                    other = stage_of[number[key]]
                    raise ScheduleError(f"{schedule.name}: {action} is done twice, on stage {other} and stage {stage}")
                number[key] = len(actions)
                if action.kind == "I":
                    number.setdefault(("B", action.chunk, action.microbatch), len(actions))
                actions.append(action)
                stage_of.append(stage)
            first.append(len(actions))
        sources: list[list[int]] = [[] for _ in range(schedule.chunks)]
        targets: list[list[int]] = [[] for _ in range(schedule.chunks)]
        for source, target in sorted(edges.forward):
            sources[target].append(source)
        for source, target in sorted(edges.backward):
            targets[source].append(target)
        needs: list[tuple[int, ...]] = []
        users: list[list[int]] = [[] for _ in actions]
        for n, action in enumerate(actions):
            found = []
            for key in _needs(action, sources, targets):
                if key not in number:
                    need = Action(*key)
                    raise ScheduleError(
                        f"{schedule.name}: {action} on stage {stage_of[n]} needs {need}, which is in no stage's list; "
                        f"add it to the list of stage {schedule.placement[need.chunk]}"
                    )
                found.append(number[key])
                users[number[key]].append(n)
            needs.append(tuple(found))
        for n, mates in enumerate(users):  # nearest first: the order in which messages leave
            here = actions[n].chunk
            mates.sort(key=lambda user, here=here: (abs(actions[user].chunk - here), user))  # type: ignore[misc]
        return ActionGraph(
            schedule, edges, tuple(actions), tuple(stage_of), tuple(first), tuple(needs), tuple(map(tuple, users))
        )

    def linear_order(self) -> list[int]:
        """One order of all actions that keeps every stage's own order and every need; an error if there is none.

        Breadth first, so that it resembles time: stages advance together as far as they can.
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
        """Which stage stands before which action, and for what it waits: for error messages."""
        lines = [f"{self.schedule.name}: this order cannot be carried out; every stage left waits for another:"]
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
