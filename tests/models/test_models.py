"""The digits are the digits, and the MLP is torch's own."""

from __future__ import annotations

import torch

from dtlab.models import MLP, digits


def test_digits_are_all_there_and_mixed() -> None:
    train, test = digits()
    assert (train.x.shape, test.x.shape) == ((1500, 64), (297, 64))
    assert train.x.min() == 0
    assert train.x.max() == 1
    for part in (train, test):
        assert part.y.bincount(minlength=10).min() > len(part.y) / 15, "every digit, about as often"


def test_an_epoch_shows_every_image_once_and_the_next_in_another_order() -> None:
    train, _ = digits()
    numbered = train._replace(y=torch.arange(1500))
    epochs = [torch.cat([numbered.batch(step, 50).y for step in range(first, first + 30)])
              for first in (0, 30)]
    assert all(epoch.sort().values.equal(numbered.y) for epoch in epochs)
    assert not epochs[0].equal(epochs[1])
    assert numbered.batch(7, 50).y.equal(numbered.batch(7, 50).y)


def test_shards_share_out_all_images() -> None:
    train, _ = digits()
    numbered = train._replace(y=torch.arange(1500))
    shards = [numbered.shard(rank, 7).y for rank in range(7)]
    assert torch.cat(shards).sort().values.equal(numbered.y)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_gradients_equal_those_of_torchs_own_layers() -> None:
    model, (train, _) = MLP((64, 16, 10)), digits(torch.float64)
    parameters = model.parameters(3, torch.float64)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()
    with torch.no_grad():
        for layer, mine in zip((layers[0], layers[2]), "01", strict=True):
            layer.weight.copy_(parameters["w" + mine].T)
            layer.bias.copy_(parameters["b" + mine])
    batch = train.batch(0, 32)
    theirs = torch.nn.functional.cross_entropy(layers(batch.x), batch.y)
    theirs.backward()
    loss, gradients = model.gradients(parameters, *batch)
    assert abs(loss - theirs.item()) < 1e-12
    torch.testing.assert_close(gradients["w0"], layers[0].weight.grad.T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients["b1"], layers[2].bias.grad, rtol=1e-12, atol=1e-14)
    assert all(not w.requires_grad for w in parameters.values())


def test_it_learns_the_digits() -> None:
    model, (train, test) = MLP(), digits()
    parameters = model.parameters()
    for step in range(300):
        _, gradients = model.gradients(parameters, *train.batch(step, 50))
        for key, slope in gradients.items():
            parameters[key] -= 0.5 * slope
    assert model.accuracy(parameters, *test) > 0.93
    assert model.loss(parameters, *test) < 0.3
