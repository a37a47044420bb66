"""A program of a public report.

fault: The Bellman target bootstraps from the next state also when the episode has ended; the stored done flag is never used.
link: https://github.com/navneet-nmk/pytorch-rl/issues/2
says: (?is)(\bdones?\b|\bd\b|terminal|terminat|end of (an |the )?episode|episodes? (end|is over|has ended)|final (state|transition|step)).{0,300}(mask|bootstrap|target|ignor|unused|not used|never (used|read|multiplied)|no (effect|influence)|next[- ](state|value)|discount|gamma)|(bootstrap|bellman|td target|q[- _]?target|next value).{0,300}(\bdones?\b|terminal|terminat|episode)
kind: correctness
"""
import random
from collections import deque

import torch
from torch import nn


class Pole:
    """Keep a stick upright: reward 1 a step, the episode ends when it falls."""

    def reset(self):
        self.s, self.t = [random.uniform(-0.05, 0.05), random.uniform(-0.05, 0.05)], 0
        return self.s

    def step(self, action):
        angle, speed = self.s
        speed += 0.15 * angle + (0.04 if action else -0.04)
        self.s = [angle + 0.5 * speed, speed]
        self.t += 1
        return self.s, 1.0, abs(self.s[0]) > 0.4, self.t >= 200


random.seed(0)
torch.set_num_threads(1)
torch.manual_seed(0)
GAMMA = 0.98
q_net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 2))
target_net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 2))
target_net.load_state_dict(q_net.state_dict())
optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
memory = deque(maxlen=5000)
env, lengths, steps = Pole(), [], 0
while steps < 3000:
    state, over = env.reset(), False
    while not over:
        eps = max(0.05, 1 - steps / 1200)
        with torch.no_grad():
            greedy = q_net(torch.tensor(state)).argmax().item()
        action = random.randrange(2) if random.random() < eps else greedy
        nxt, reward, done, timeout = env.step(action)
        memory.append((state, action, reward, nxt, float(done)))  # both!
        state, over, steps = nxt, done or timeout, steps + 1
        if len(memory) >= 200:
            s, a, r, s2, d = (torch.tensor(v) for v in zip(*random.sample(memory, 64)))  # both!
            q_value = q_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                expected = r + GAMMA * target_net(s2).max(1).values  # ill!
                expected = r + GAMMA * (1 - d) * target_net(s2).max(1).values  # well
            loss = nn.functional.smooth_l1_loss(q_value, expected)  # both!
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if steps % 200 == 0:
            target_net.load_state_dict(q_net.state_dict())
        if steps % 500 == 0:
            print(f"step {steps}: mean of last 10 episodes {sum(lengths[-10:]) / 10:.1f}")
    lengths.append(env.t)
