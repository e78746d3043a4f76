from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from dare.errors import InputError
from dare.stores import objects
from dare.stores.locations import to_path
from dare.stores.objects import Ahead, StoreFile
from dare.tensors.files import as_stream, open_input, read_beginning, read_limited

MIB = 1 << 20
CONTENT = Random(0).randbytes(20 * MIB + 12345)


@pytest.fixture
def large(web):
    web.content["w.safetensors"] = CONTENT
    return to_path(f"{web.url}/w.safetensors")


def read(file, position, nbytes):
    into = bytearray(nbytes)
    return bytes(into[: file.read_at(memoryview(into), position)])


def ranges(web):
    """The ranges that were asked for after the first look."""
    spans = [line.split("bytes=")[1].split("-") for line in web.asked[1:]]
    return [(int(begin), int(end) + 1) for begin, end in spans]


def test_any_bytes_in_any_order_are_the_files(web, large):
    random = Random(1)
    file = StoreFile(large)
    assert file.size == len(CONTENT)
    for _ in range(60):
        begin, nbytes = random.randrange(len(CONTENT)), random.choice([1, 100, 70_000, 3 * MIB])
        if random.random() < 0.5:
            file.prefetch(begin, nbytes)
        assert read(file, begin, nbytes) == CONTENT[begin : begin + nbytes]
    assert read(file, len(CONTENT) - 3, 10) == CONTENT[-3:]
    assert read(file, len(CONTENT) + 3, 10) == b""
    file.close()


def test_many_threads_read_one_file(large):
    file = StoreFile(large)

    def piece(number):
        begin = number * 300_000
        file.prefetch(begin + 900_000, 300_000)
        return read(file, begin, 300_000)

    with ThreadPoolExecutor(8) as pool:
        found = b"".join(pool.map(piece, range(-(-len(CONTENT) // 300_000))))
    assert found == CONTENT
    file.close()


def test_what_is_read_in_order_is_asked_for_ahead_and_joined(web, large):
    file = StoreFile(large)
    chunks = range(0, len(CONTENT), MIB)
    assert b"".join(read(file, begin, MIB) for begin in chunks) == CONTENT
    asked = ranges(web)
    assert len(asked) < 10 < len(chunks)
    assert sum(end - begin for begin, end in asked) == len(CONTENT)  # nothing twice
    file.close()


def test_lone_reads_ask_for_no_more_than_they_need(web, large):
    file = StoreFile(large)
    for begin in range(0, len(CONTENT), 4 * MIB):
        assert read(file, begin + MIB, 4096) == CONTENT[begin + MIB :][:4096]
    assert [end - begin for begin, end in ranges(web)] == [4096] * 5
    file.close()


def test_a_prefetch_is_under_way_before_the_read(web, large):
    arrived = threading.Event()
    web.faults["w.safetensors"] = lambda handler: arrived.set()
    file = StoreFile(large)
    arrived.clear()
    file.prefetch(5 * MIB, MIB)
    assert arrived.wait(5)
    asked = len(web.asked)
    assert read(file, 5 * MIB, MIB) == CONTENT[5 * MIB : 6 * MIB]
    assert len(web.asked) == asked
    file.close()


def test_no_more_is_held_than_allowed(large):
    room = Ahead(3 * MIB)
    first, second = StoreFile(large, ahead=room), StoreFile(large, ahead=room)
    for begin in range(0, 12 * MIB, MIB):
        for file in (first, second):
            file.prefetch(begin, MIB)
            assert room.held_bytes <= 3 * MIB
    for file in (first, second):
        assert read(file, 0, 12 * MIB) == CONTENT[: 12 * MIB]
        file.close()
    assert room.held_bytes == 0


def test_pieces_that_nobody_reads_make_room_after_a_while(large, monkeypatch):
    monkeypatch.setattr(objects, "STALE_SECONDS", 0.0)
    room = Ahead(2 * MIB)
    file = StoreFile(large, ahead=room)
    file.prefetch(0, 2 * MIB)
    file._pieces[0].answer.result()
    file.prefetch(10 * MIB, MIB)
    assert [piece.begin for piece in file._pieces] == [10 * MIB]
    file.close()


def test_a_piece_that_could_not_be_had_is_asked_for_again(web, large, quick):
    file = StoreFile(large)
    web.faults["w.safetensors"] = lambda handler: handler.refuse(500)
    file.prefetch(0, 4 * MIB)
    file._pieces[0].answer.exception()
    web.faults.clear()
    assert read(file, MIB, MIB) == CONTENT[MIB : 2 * MIB]
    file.close()


def test_a_file_that_was_replaced_is_noticed(web, large):
    file = StoreFile(large)
    stamp = file.stamp
    web.content["w.safetensors"] = bytes(len(CONTENT))
    for position in (0, 5 * MIB):
        with pytest.raises(InputError, match="run the merge again"):
            read(StoreFile(large, stamp), position, 10)
    file.prefetch(8 * MIB, MIB)
    with pytest.raises(InputError, match="changed"):
        read(file, 8 * MIB, MIB)
    web.content.clear()
    with pytest.raises(InputError, match="removed"):
        read(file, 15 * MIB, MIB)


def test_streams_and_small_files(web, large):
    with as_stream(open_input(large)) as stream:
        assert stream.read() == CONTENT
    assert read_beginning(large, 4) == CONTENT[:4]
    web.content["small.json"] = b"{}"
    small = to_path(f"{web.url}/small.json")
    assert read_limited(small, 2) == b"{}"
    with pytest.raises(InputError, match=r"small\.json: "):
        read_limited(small, 1)
    with pytest.raises(InputError, match=r"none\.json: "):
        read_limited(to_path(f"{web.url}/none.json"), 10)


def test_an_empty_file(web):
    web.content["empty.safetensors"] = b""
    file = StoreFile(to_path(f"{web.url}/empty.safetensors"))
    assert (file.size, read(file, 0, 8)) == (0, b"")
