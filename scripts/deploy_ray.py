"""`martlet deploy ray`: replicas of one model on Ray Serve, one engine each, behind one address.
Owns the options and what is started; what a replica does is ray_replica.py, who gets a request
ray_router.py."""

from __future__ import annotations

import enum
import signal
import threading
from typing import Annotated, Any

import typer
from martlet.quant.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import note
from martlet.scripts.exposure import check_exposure

deploy = typer.Typer(no_args_is_help=True, help="Start a model on engines that distribute work.")

APP = "martlet"
NEWS_S = 2.0  # between two looks at what replicas have cached
HEALTH_S = 5.0


class Routing(str, enum.Enum):
    prefix = "prefix"
    random = "random"


@deploy.callback()
def common() -> None:
    """Start a model on engines that distribute work."""


@deploy.command("ray")
def deploy_ray(
    model: Annotated[str, typer.Option(help="A known name, hf:ORG/REPO/FILE, or a path.")],
    replicas: Annotated[int, typer.Option(min=1, help="Engines; with --most: at least.")] = 1,
    threads_per_replica: Annotated[int, typer.Option(min=1, help="Cores of each.")] = 1,
    most: Annotated[
        int | None, typer.Option(min=1, help="Replicas when many requests are unfinished.")
    ] = None,
    target: Annotated[
        float, typer.Option(min=1, help="With --most: unfinished requests of a replica aimed at.")
    ] = 8,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster; default: one on this machine.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where the HTTP proxy listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    context: options.ContextOption = None,
    kv_bytes: options.KvBytesOption = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Waiting requests of a replica.")] = 64,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 16 << 20,
    api_key: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    insecure: Annotated[bool, typer.Option(help="Open to the network without a key.")] = False,
    routing: Annotated[Routing, typer.Option(help="Who gets a request.")] = Routing.prefix,
    share_weights: Annotated[
        bool, typer.Option(help="One packed copy of the weights on each node (Linux).")
    ] = True,
) -> None:
    """Serves MODEL from several replicas on Ray Serve, in the shapes of `martlet serve`.

    A request goes where most of its prompt is cached, unless that replica is behind the others.
    """
    ray, serve = imported()
    from martlet.scripts.serve_many import served_name

    check_exposure(host, has_key=bool(api_key), is_insecure=insecure)
    if most is not None and most < replicas:
        raise typer.BadParameter(f"--most {most} is less than --replicas {replicas}")
    name = served_name(model)
    load = {
        "executor": "auto",
        "threads": threads_per_replica,
        "context": context,
        "kv_bytes": kv_bytes,
        "share_weights": share_weights,
    }
    engine = {"max_queue": max_queue}
    ray.init(address=address, log_to_driver=True, logging_level="warning")
    try:
        serve.start(http_options={"host": host, "port": port})
        bound = application(
            (model, name, load, engine, tuple(api_key or ())),
            replicas=(replicas, most, target),
            threads=threads_per_replica,
            policy=routing.value,
            max_body=max_body,
        )
        serve.run(bound, name=APP, route_prefix="/")
        note(f"{name} on {replicas} replicas at http://{host}:{port}/v1")
        print(f"http://{host}:{port}/v1", flush=True)
        wait_for_signal()
    finally:
        serve.shutdown()
        ray.shutdown()


def imported() -> tuple[Any, Any]:
    """Ray and Ray Serve. Raises MartletError where they are not installed."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise MartletError(f"{error}; Ray is missing here: pip install 'martlet[ray]'") from None
    return ray, serve


def application(
    arguments: tuple[Any, ...],
    *,
    replicas: tuple[int, int | None, float],
    threads: int,
    policy: str,
    max_body: int,
) -> Any:
    """The front bound to its replicas. arguments: of ray_replica.Replica; replicas: at least, at
    most, and how many unfinished requests of each are aimed at."""
    from martlet.scripts.ray_replica import Front, Replica
    from martlet.scripts.ray_router import PrefixRouter
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    least, most, target = replicas
    size: dict[str, Any] = {"num_replicas": least}
    if most is not None:
        size = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least, max_replicas=most, target_ongoing_requests=target
            )
        }
    held = serve.deployment(Replica).options(
        name="Replica",
        ray_actor_options={"num_cpus": threads},
        max_ongoing_requests=1 << 16,  # the engine itself refuses what is beyond its queue
        health_check_period_s=HEALTH_S,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"policy": policy},
            request_routing_stats_period_s=NEWS_S,
        ),
        **size,
    )
    front = serve.deployment(Front).options(
        name="Front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1 << 16
    )
    return front.bind(held.bind(*arguments), max_body)


def wait_for_signal() -> None:
    """Until SIGINT or SIGTERM."""
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    while not ended.wait(1):
        pass
