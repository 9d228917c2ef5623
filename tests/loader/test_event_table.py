from hypothesis import given
from hypothesis import strategies as st

from energon.loader.transport.slots import EventLayout, EventTable, read_table

number = st.integers(0, 2**40)
layouts = st.lists(
    st.builds(EventLayout, number, number, number, st.lists(st.tuples(number, number), max_size=3)),
    max_size=5,
)


@given(layouts)
def test_reads_what_was_written(written):
    table = EventTable()
    for layout in written:
        table.append(layout)
    assert len(table) == len(written)
    assert read_table(memoryview(table.to_bytes())) == written
