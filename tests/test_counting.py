from energon.messages import counted


def test_one_of_a_thing_is_not_called_like_several():
    assert counted(1, "shard") == "1 shard"
    assert counted(0, "shard") == "0 shards"
    assert counted(2, "batch") == "2 batches"
    assert counted(2, "join index") == "2 join indexes"
    assert counted(1, "shard is", "shards are") == "1 shard is"
    assert counted(3, "shard is", "shards are") == "3 shards are"
    assert counted(12345, "sample", grouped=True) == "12,345 samples"
