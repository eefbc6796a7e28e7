"""The door and the engines without Ray: what arrives is exact whatever breaks between them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import InvalidRequestError, QueueFullError, UnavailableError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.engine.async_engine import EngineHealth
from nanoserve.serving import replica
from nanoserve.serving.feed import FeedDoor, PeerState
from nanoserve.serving.wire import Abort, EngineCard, FeedItem, Hello, Submit
from tests.serving import fakes
from tests.serving.feed_rig import QUICK, Log, Rig, answer, ask, read, request, until


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(fakes, "STEP_S", 0.005)
    rig = Rig()
    yield rig
    await rig.close()


async def test_streams_are_exact_and_spread_over_the_engines(rig: Rig) -> None:
    await rig.join("a", "b")
    asked = [request(f"r{i}", 20 + i, seed=i) for i in range(16)]
    streams = [await rig.door.open(each) for each in asked]
    booked = [len(peer.streams) for peer in rig.door.peers]
    assert booked == [8, 8]
    for each, stream in zip(asked, streams, strict=True):
        assert (await read(stream))[0] == answer(each)
    assert rig.door.num_open == 0
    assert rig.log.ends == ["length"] * 16
    assert rig.log.num_first_tokens == 16
    assert len(rig.log.paces) == 16
    assert all(0.002 < pace < 1 for pace in rig.log.paces), "a step takes 5 ms"


async def test_a_slow_reader_gets_one_merged_output(rig: Rig) -> None:
    await rig.join("a")
    asked = request("r", 12)
    stream = await rig.door.open(asked)
    await until(lambda: stream.finished)
    output = await stream.next()
    assert list(output.new_token_ids) == answer(asked)
    assert output.finish_reason is FinishReason.LENGTH


async def test_streams_go_on_elsewhere_when_an_engine_is_killed(rig: Rig) -> None:
    await rig.join("a", "b")
    asked = [request(f"r{i}", 80, seed=i) for i in range(12)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 12)
    rig.transport.kill("a")
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]
    assert rig.log.num_resubmits == 6
    assert [peer.peer_id for peer in rig.door.peers] == ["b"]


async def test_streams_leave_an_engine_that_says_it_is_stuck(rig: Rig) -> None:
    await rig.join("a", "b")
    asked = [request(f"r{i}", 80, seed=i) for i in range(4)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 4)
    peer = next(peer for peer in rig.door.peers if peer.peer_id == "a")
    rig.door._absorb(peer, [FeedItem(peer.seq, (), peer.stats, "stuck", "Nothing has moved for 20 s.")])
    assert [peer.peer_id for peer in rig.door.peers] == ["b"]
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]


async def test_streams_wait_for_a_replacement_of_the_only_engine(rig: Rig) -> None:
    await rig.join("a")
    asked = request("r", 40)
    waiting = asyncio.create_task(ask(rig, asked))
    await until(lambda: rig.log.num_first_tokens == 1)
    rig.transport.kill("a")
    rig.leave("a")
    await until(lambda: rig.door.trouble() is not None)
    await rig.join("b")
    assert await waiting == answer(asked)


async def test_a_stream_that_finds_no_engine_ends_with_an_error(rig: Rig) -> None:
    rig.door._config = replace(QUICK, failover_wait_s=0.2)
    await rig.join("a")
    stream = await rig.door.open(request("r", 1000))
    rig.transport.kill("a")
    rig.leave("a")
    _, last = await read(stream)
    assert last.error is not None
    assert last.error[0] == "service_unavailable_error"
    assert rig.log.ends == ["error"]
    assert rig.door.num_open == 0


async def test_a_broken_feed_resumes_without_computing_anything_twice(rig: Rig) -> None:
    await rig.join("a")
    asked = request("r", 60)
    reading = asyncio.create_task(ask(rig, asked))
    for _ in range(4):
        await asyncio.sleep(0.04)
        rig.transport.cut("a")
    assert await reading == answer(asked)
    assert rig.log.num_resubmits == 0


async def test_what_an_unreachable_engine_still_sends_is_dropped(rig: Rig) -> None:
    """The engine lives on and computes; its request has moved, so its tokens must not appear a second time."""
    await rig.join("a", "b")
    asked = [request(f"r{i}", 80, seed=i) for i in range(6)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 6)
    rig.transport.unreachable.add("a")
    rig.transport.cut("a")
    await until(lambda: rig.log.num_resubmits == 3)
    rig.transport.unreachable.discard("a")
    await until(lambda: len(rig.door.peers) == 2)
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]
    await until(lambda: rig.running("a") == 0)


async def test_a_closed_stream_is_gone_before_the_next_step_but_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "STEP_S", 0.05)
    await rig.join("a")
    streams = [await rig.door.open(request(f"r{i}", 1000)) for i in range(3)]
    await until(lambda: rig.running("a") == 3)
    for stream in streams:
        stream.close()
        stream.close()
    step_id = rig.log.steps[-1][1].step_id
    await until(lambda: rig.running("a") == 0)
    freed = next(stats for _, stats in rig.log.steps if stats.step_id > step_id and stats.num_running == 0)
    assert freed.step_id - step_id <= 2
    assert freed.num_free_blocks == freed.num_blocks
    assert rig.log.ends == ["abort"] * 3


async def test_aborts_of_one_tick_travel_in_one_call(rig: Rig) -> None:
    await rig.join("a")
    streams = [await rig.door.open(request(f"r{i}", 1000)) for i in range(8)]
    await until(lambda: rig.running("a") == 8)
    rig.transport.ctl_calls.clear()
    for stream in streams:
        stream.close()
    await until(lambda: rig.running("a") == 0)
    assert next(len(ops) for _, ops in rig.transport.ctl_calls if isinstance(ops[0], Abort)) == 8


async def test_a_client_that_leaves_during_the_submit_leaves_nothing(rig: Rig) -> None:
    await rig.join("a")
    opening = asyncio.create_task(rig.door.open(request("r", 1000)))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert rig.door.num_open == 0
    await until(lambda: [type(op) for _, ops in rig.transport.ctl_calls for op in ops][-1] is Abort)
    await until(lambda: rig.running("a") == 0)


async def test_a_leaving_engine_finishes_its_streams_and_gets_no_new_ones(rig: Rig) -> None:
    await rig.join("a", "b")
    asked = [request(f"r{i}", 60, seed=i) for i in range(4)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 4)
    rig.leave("a")
    assert {peer.peer_id: peer.state for peer in rig.door.peers} == {"a": PeerState.RETIRING, "b": PeerState.UP}
    late = await rig.door.open(request("late", 5))
    assert late.peer is not None
    assert late.peer.peer_id == "b"
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]
    assert rig.log.num_resubmits == 0
    await until(lambda: "a" in rig.transport.released)
    assert "b" in rig.transport.held


async def test_an_idle_engine_that_leaves_is_let_go_at_once(rig: Rig) -> None:
    await rig.join("a", "b")
    rig.leave("a")
    assert rig.transport.released == ["a"]


async def test_without_an_engine_a_request_waits_and_is_refused(rig: Rig) -> None:
    with pytest.raises(UnavailableError, match="No engine has started"):
        await rig.door.open(request("r"))
    opening = asyncio.create_task(rig.door.open(request("s", 5)))
    await asyncio.sleep(0.05)
    await rig.join("a")
    assert (await read(await opening))[0] == answer(request("s", 5))


async def test_a_full_engine_is_passed_over_and_full_engines_refuse(rig: Rig) -> None:
    await rig.join("a", "b", max_num_seqs=1, max_queued_requests=1)
    streams = [await rig.door.open(request(f"r{i}", 1000)) for i in range(2)]
    await until(lambda: rig.running("a") + rig.running("b") == 2)
    streams += [await rig.door.open(request(f"q{i}", 1000)) for i in range(2)]
    with pytest.raises(QueueFullError) as caught:
        await rig.door.open(request("x", 10))
    assert caught.value.retry_after_s > 0
    assert rig.door.num_open == 4
    for stream in streams:
        stream.close()


async def test_the_door_bounds_its_open_requests(rig: Rig) -> None:
    rig.door._config = replace(QUICK, max_open_requests=2)
    await rig.join("a")
    streams = [await rig.door.open(request(f"r{i}", 1000)) for i in range(2)]
    with pytest.raises(QueueFullError):
        await rig.door.open(request("x"))
    streams[0].close()
    assert await ask(rig, request("y", 5)) == answer(request("y", 5))


async def test_a_request_that_can_never_fit_is_refused(rig: Rig) -> None:
    await rig.join("a")
    with pytest.raises(InvalidRequestError):
        await rig.door.open(request("r", prompt=(1,) * 10_000))
    assert rig.door.num_open == 0
    assert not any(peer.streams for peer in rig.door.peers)


async def test_a_poisoned_request_takes_no_more_than_its_attempts(rig: Rig) -> None:
    """It breaks every engine it runs on; the streams beside it survive on those that are left."""
    await rig.join("a", "b", "c", "d")
    asked = [request(f"r{i}", 100, seed=i) for i in range(4)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 4)
    _, last = await read(await rig.door.open(request("poison", prompt=(fakes.POISON, 1))))
    assert last.error is not None
    assert "poisoned" in last.error[1]
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]


async def test_who_shared_an_engine_with_a_poisoned_request_twice_meets_it_no_third_time(rig: Rig) -> None:
    """One engine at a time: all are lost together until the suspects are tried one by one."""
    await rig.join("a")
    asked = [request(f"r{i}", 60, seed=i) for i in range(4)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 4)
    poisoned = asyncio.create_task(read(await rig.door.open(request("poison", prompt=(fakes.POISON, 1)))))
    for name in "bcde":
        await until(lambda: not rig.door.peers or (poisoned.done() and all(each.done() for each in answers)), 10)
        await rig.join(name)
    _, last = await poisoned
    assert last.error is not None
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]


async def test_a_silent_engine_gets_no_work_and_then_loses_its_streams(rig: Rig) -> None:
    rig.door._config = replace(QUICK, suspect_after_s=0.2, dead_after_s=0.6, readopt_after_s=60)
    await rig.join("a", "b")
    asked = [request(f"r{i}", 400, seed=i) for i in range(4)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: rig.log.num_first_tokens == 4)
    rig.transport.replicas["a"]._outboxes = {}
    await asyncio.sleep(0.3)
    late = await rig.door.open(request("late", 5))
    assert late.peer is not None
    assert late.peer.peer_id == "b"
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]
    assert rig.log.num_resubmits == 2


async def test_draining_refuses_new_requests_and_ends_the_last_ones_with_an_error(rig: Rig) -> None:
    await rig.join("a")
    short, long = request("short", 10), request("long", 10_000 // 4)
    streams = [await rig.door.open(short), await rig.door.open(long)]
    draining = asyncio.create_task(rig.door.drain(0.3))
    await asyncio.sleep(0)
    assert rig.door.trouble() is not None
    with pytest.raises(UnavailableError):
        await rig.door.open(request("new"))
    assert (await read(streams[0]))[0] == answer(short)
    token_ids, last = await read(streams[1])
    assert token_ids == answer(long)[: len(token_ids)]
    assert last.error is not None
    assert last.error[0] == "service_unavailable_error"
    await draining
    await until(lambda: rig.running("a") == 0)


async def test_a_door_that_is_idle_is_not_taken_for_dead(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "DOOR_TIMEOUT_S", 0.8)
    rig.door._config = replace(QUICK, ping_after_s=0.1)
    await rig.join("a")
    await asyncio.sleep(1.6)
    assert "door" in rig.transport.replicas["a"]._outboxes
    assert rig.door.trouble() is None


async def test_an_engine_drops_a_door_that_died_without_a_word(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its feed would count as an ongoing request and hold up a drain."""
    monkeypatch.setattr(replica, "DOOR_TIMEOUT_S", 0.3)
    engine = rig.transport.add("a")
    feed = engine.feed("ghost", 0, "")
    assert isinstance(await anext(feed), Hello)
    engine.ctl("ghost", [Submit(request("r", 1000))])
    async with asyncio.timeout(5):
        async for _ in feed:
            pass
    assert engine._outboxes == {}
    assert engine._owners == {}


async def test_a_door_that_leaves_lets_go_of_its_engines(rig: Rig) -> None:
    await rig.join("a", "b")
    rig.door.leave()
    assert sorted(rig.transport.released) == ["a", "b"]
    engine = rig.transport.replicas["a"]
    await until(lambda: engine._outboxes.get("door") is None or engine._outboxes["door"].reader is None)


async def test_an_engine_whose_door_stays_away_drops_its_requests(rig: Rig) -> None:
    await rig.join("a")
    engine = rig.transport.replicas["a"]
    await rig.door.open(request("r", 1000))
    await until(lambda: rig.running("a") == 1)
    rig.door._close_peer(rig.door.peers[0])
    await until(lambda: not engine._outboxes)
    await until(lambda: engine._stats.num_running == 0)
    assert engine._owners == {}


def test_an_outbox_keeps_so_many_vectors_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring that a door resumes from holds thousands of steps; with embeddings in each it would fill the memory."""
    monkeypatch.setattr(replica, "RING_VECTOR_BYTES", 1000)
    outbox, health = replica._Outbox(), EngineHealth(state="running", reason="", last_progress_s=0.0)
    for index in range(50):
        pooled = bytes(100 * (index % 3))
        outbox.push((RequestOutput(str(index), pooled=pooled), RequestOutput("r", (1,))), StepStats(), health)
        kept = [len(output.pooled) for item in outbox.items for output in item.outputs]
        assert sum(kept) == outbox.num_vector_bytes <= 1000
    assert outbox.can_resume(outbox.items[0].seq - 1)
    assert not outbox.can_resume(outbox.items[0].seq - 2)
    outbox.push((RequestOutput("large", pooled=bytes(5000)),), StepStats(), health)
    assert [item.seq for item in outbox.items] == [51], "the newest is always there to be read"
    for _ in range(replica.RING_ITEMS + 5):
        outbox.push((), StepStats(), health)
    assert (len(outbox.items), outbox.num_vector_bytes) == (replica.RING_ITEMS, 0)


async def test_a_prefix_goes_where_its_blocks_are(rig: Rig) -> None:
    await rig.join("a", "b")
    system = tuple(range(1000, 1400))
    first = await rig.door.open(request("first", 4, prompt=(*system, 1)))
    assert first.peer is not None
    home = first.peer.peer_id
    await read(first)
    burst = [await rig.door.open(request(f"r{index}", 200, prompt=(*system, 2, index))) for index in range(4)]
    assert {stream.peer.peer_id for stream in burst if stream.peer} == {home}
    other = await rig.door.open(request("other", 4, prompt=range(5000, 5400)))
    assert other.peer is not None
    assert other.peer.peer_id != home
    for stream in [*burst, other]:
        stream.close()


async def test_a_burst_with_a_new_prefix_goes_to_one_engine(rig: Rig) -> None:
    """Before any of its blocks is computed: the door knows what it has just sent where."""
    await rig.join("a", "b")
    system = tuple(range(1000, 1400))
    opening = [rig.door.open(request(f"r{index}", 200, prompt=(*system, index))) for index in range(3)]
    streams = await asyncio.gather(*opening)
    assert len({stream.peer.peer_id for stream in streams if stream.peer}) == 1
    for stream in streams:
        stream.close()
    assert not rig.door._kv._expected


async def test_a_new_door_learns_what_is_cached(rig: Rig) -> None:
    await rig.join("a", "b")
    system = tuple(range(1000, 1400))
    first = await rig.door.open(request("first", 4, prompt=(*system, 1)))
    assert first.peer is not None
    home = first.peer.peer_id
    await read(first)
    other = FeedDoor(rig.transport.as_door("door-2"), QUICK, Log())
    other.set_members(frozenset({"a", "b"}))
    await until(lambda: len([peer for peer in other.peers if peer.card]) == 2)
    for index in range(3):
        stream = await other.open(request(f"r{index}", 50, prompt=(*system, 7, index)))
        assert stream.peer is not None
        assert stream.peer.peer_id == home
    other.leave()
    await until(lambda: not other._tasks)


async def test_what_an_engine_evicts_attracts_no_more(rig: Rig) -> None:
    await rig.join("a", "b")
    peer = rig.door.peers[0]
    rig.door._kv.reset(peer.peer_id, [1, 2, 3])
    stats = StepStats(step_id=10**6, blocks_evicted=(2,), blocks_published=(4,))
    rig.door._absorb(peer, [FeedItem(peer.seq + 1, (), stats, "idle", "")])
    assert rig.door._kv.num_blocks(peer.peer_id) == 3


async def test_engines_share_the_threads_that_the_machine_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group's limit counts, not the cores that the system shows."""
    granted: list[int | None] = []

    def make_engine(args: EngineArgs, deliver: replica.Deliver) -> tuple[replica.Engine, EngineCard]:
        granted.append(args.num_threads)
        return fakes.make_engine(args, deliver)

    monkeypatch.setattr(replica, "default_threads", lambda: 6)
    for args, siblings in ((EngineArgs(), 1), (EngineArgs(), 4), (EngineArgs(), 9), (EngineArgs(num_threads=5), 4)):
        replica.EngineReplica(args, make_engine, siblings)._engine.stop()
    assert granted == [6, 1, 1, 5]


async def test_a_request_that_finds_all_asleep_wakes_an_engine_and_waits_for_it(rig: Rig) -> None:
    """Where idle engines go, the door without one is well; the first request wakes one, and its answer is right."""
    calls, awake = list[float](), asyncio.Event()

    async def wake() -> None:
        calls.append(asyncio.get_running_loop().time())
        await awake.wait()

    rig.door = FeedDoor(rig.transport, replace(QUICK, engine_wait_s=5.0), rig.log, wake=wake)
    await rig.join("a")
    rig.leave("a")
    await until(lambda: not rig.door.peers)
    assert rig.door.trouble() is None, "asleep is not ill"
    assert not calls
    asked = [request(f"r{i}", seed=i) for i in range(2)]
    answers = [asyncio.create_task(ask(rig, each)) for each in asked]
    await until(lambda: bool(calls))
    await rig.join("b")
    awake.set()
    assert await asyncio.gather(*answers) == [answer(each) for each in asked]
    assert len(calls) == 1


async def test_what_outlasts_a_running_out_ends_with_an_error_and_newcomers_are_still_taken(rig: Rig) -> None:
    await rig.join("a")
    stream = await rig.door.open(request("long", 2000))
    running_out = asyncio.create_task(rig.door.run_out(0.3))
    await ask(rig, request("late", 3))
    _, last = await read(stream)
    assert last.error is not None
    assert last.error[0] == "service_unavailable_error"
    await running_out
