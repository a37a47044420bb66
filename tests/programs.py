"""Training programs that several files of tests start."""

# ``steps(count)`` trains by hand: an optimizer of torch's own takes a second to import.
STEPS_BY_HAND = """
import os, sys, time, signal
import torch
model = torch.nn.Linear(4, 1)
def steps(count):
    for _ in range(count):
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
"""
