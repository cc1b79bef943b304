"""Two models, two accumulators, one Batches: a small GAN learns a ring, whatever the micro-batch size.

python examples/gan.py [--steps 400] [--microbatch-size 64]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import augend


def ring(rows: int) -> Tensor:
    """Return points on a noisy ring of radius 2, ``[rows, 2]``."""
    angle = torch.rand(rows, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    noise = 0.05 * torch.randn(rows, 2, generator=torch.Generator().manual_seed(1))
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + noise


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


def main(steps: int, microbatch_size: int) -> tuple[Tensor, augend.Finished, augend.Finished]:
    """Train both models and return radii of generated points and the last losses of critic and generator."""
    torch.manual_seed(0)
    critic, generator = network(2, 1), network(4, 2)
    judged = augend.Accumulator(critic, foreign="drop")  # the generator's loss flows through the critic
    made = augend.Accumulator(generator)
    step_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    step_generator = torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    data = augend.Batches(ring(4096), batch_size=256, microbatch_size=microbatch_size, seed=0)
    bce = augend.losses.binary_cross_entropy

    for batch in data:
        for microbatch in judged.microbatches(batch, together=[made]):
            real = microbatch[0]  # [rows, 2]
            fake = generator(torch.randn(len(real), 4))  # random state is the micro-batch's own
            made.backward(bce(critic(fake), torch.ones(len(real), 1)))
            scores, invented = critic(real), critic(fake.detach())
            judged.backward(bce(scores, torch.ones_like(scores)) + bce(invented, torch.zeros_like(invented)))
        critic_done = judged.step(step_critic, max_norm=1.0)
        generator_done = made.step(step_generator, max_norm=1.0)
        if batch.step % 100 == 0:
            print(f"step {batch.step:4}  critic {critic_done.loss}  generator {generator_done.loss}")
        if batch.step + 1 == steps:
            break
    with torch.no_grad():
        return generator(torch.randn(1000, 4)).norm(dim=1), critic_done, generator_done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--microbatch-size", type=int, default=64)
    arguments = parser.parse_args()
    radii, _, _ = main(arguments.steps, arguments.microbatch_size)
    print(f"radius of generated points: {radii.mean():.3f} ± {radii.std():.3f} (the ring has 2)")
