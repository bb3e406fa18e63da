"""One act of the plan as one call of a backend."""

from __future__ import annotations

from remediation.backends.base import SlurmBackend
from remediation.policy.case import Act


async def perform(backend: SlurmBackend, act: Act) -> None:
    """Do it. Raises SlurmFault where Slurm does not, ValueError where the act is none of the backend's."""
    args, target = act.args, act.target
    match act.kind:
        case "drain":
            await backend.drain(target, args["reason"])
        case "set_down":
            await backend.set_down(target, args["reason"])
        case "resume":
            await backend.resume(target)
        case "undown":
            await backend.undown(target)
        case "requeue":
            await backend.requeue(int(target), hold=args["hold"] == "true")
        case "set_exclude":
            await backend.set_exclude(int(target), tuple(args["nodes"].split(",")) if args["nodes"] else ())
        case "start_in":
            await backend.start_in(int(target), int(args["seconds"]))
        case "release":
            await backend.release(int(target))
        case "signal":
            await backend.signal(int(target), args["name"])
        case _:
            raise ValueError(f"{act.kind!r} is not an act of a backend")
