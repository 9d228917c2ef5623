import os
import socket

import pytest

from energon.loader.transport.events import Message, MessageKind, receive, send


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_descriptors_travel_with_their_message(ends):
    here, there = ends
    reading, writing = os.pipe()
    send(here, Message(MessageKind.FREE, 1))
    send(here, Message(MessageKind.OPEN, generation=2**40, descriptors=[writing]))
    os.close(writing)
    assert receive(there).descriptors == []
    message = receive(there)
    assert message.generation == 2**40
    os.write(message.descriptors[0], b"x")
    assert os.read(reading, 1) == b"x"
    os.close(message.descriptors[0])
    os.close(reading)


def test_the_end_of_the_other_side_is_none(ends):
    here, there = ends
    send(here, Message(MessageKind.FREE, 1))
    here.close()
    assert receive(there).slot == 1
    assert receive(there) is None


def test_half_a_message_is_the_end(ends):
    here, there = ends
    here.send(b"abc")
    here.close()
    assert receive(there) is None
