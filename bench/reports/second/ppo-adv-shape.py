"""A program of a public report.

fault: The probability ratio has shape (N,) and the advantages (N,1), so the PPO surrogate is an (N,N) matrix that pairs each ratio with each advantage.
link: https://github.com/RITCHIEHuang/DeepRL_Algorithms/issues/13
says: (?is)broadcast|(\(|\[)128(, ?1?)?(\)|\]).{0,200}(\(|\[)128, ?128(\)|\])|128 ?(x|×|by) ?128|outer product|(every|each|all) (ratio|sample|row|pair|advantage).{0,120}(every|each|all|other)|(ratio|advantage|surr\w*).{0,250}(shape|\(?N, ?N\)?|pairwise|all pairs)
kind: correctness
"""
"""PPO with GAE on a small grid world."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class GridWorld:
    """Walk from the top left corner to the bottom right corner, one cell in the middle is a trap."""

    size, n_action, max_steps = 5, 4, 30

    def reset(self):
        self.pos, self.t = [0, 0], 0
        return self._obs()

    def _obs(self):
        obs = np.zeros(self.size * self.size, dtype=np.float32)
        obs[self.pos[0] * self.size + self.pos[1]] = 1
        return obs

    def step(self, a):
        dy, dx = [(-1, 0), (1, 0), (0, -1), (0, 1)][a]
        self.pos = [min(max(self.pos[0] + dy, 0), self.size - 1), min(max(self.pos[1] + dx, 0), self.size - 1)]
        self.t += 1
        if self.pos == [self.size - 1, self.size - 1]:
            return self._obs(), 10.0, True
        if self.pos == [2, 2]:
            return self._obs(), -5.0, True
        return self._obs(), -0.2, self.t >= self.max_steps


class Policy(nn.Module):
    def __init__(self, dim_state, dim_action, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim_state, hidden), nn.Tanh(), nn.Linear(hidden, dim_action))

    def get_log_prob(self, states, actions):
        return Categorical(logits=self.net(states)).log_prob(actions)

    def get_action(self, state):
        dist = Categorical(logits=self.net(state))
        return dist.sample()


class Value(nn.Module):
    def __init__(self, dim_state, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim_state, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x)


def estimate_advantages(rewards, masks, values, gamma, tau):
    deltas, advantages = torch.zeros_like(values), torch.zeros_like(values)  # both!
    prev_value, prev_advantage = 0., 0.
    for i in reversed(range(rewards.size(0))):
        deltas[i] = rewards[i] + gamma * prev_value * masks[i] - values[i]
        advantages[i] = deltas[i] + gamma * tau * prev_advantage * masks[i]
        prev_value, prev_advantage = values[i, 0], advantages[i, 0]
    returns = values + advantages
    advantages = (advantages - advantages.mean()) / advantages.std()
    return advantages, returns  # both!


def ppo_step(policy_net, value_net, optimizer_policy, optimizer_value, states, actions, returns, advantages,
             old_log_probs, clip_epsilon):
    value_loss = (value_net(states) - returns).pow(2).mean()
    optimizer_value.zero_grad()
    value_loss.backward()
    optimizer_value.step()

    log_probs = policy_net.get_log_prob(states, actions)  # both!
    ratio = torch.exp(log_probs - old_log_probs)  # both!
    surr1 = ratio * advantages  # ill!
    surr2 = torch.clamp(ratio, 1.0 - clip_epsilon, 1.0 + clip_epsilon) * advantages  # ill!
    surr1 = ratio * advantages.reshape(-1)  # well
    surr2 = torch.clamp(ratio, 1.0 - clip_epsilon, 1.0 + clip_epsilon) * advantages.reshape(-1)  # well
    policy_loss = -torch.min(surr1, surr2).mean()  # both!
    optimizer_policy.zero_grad()
    policy_loss.backward()
    optimizer_policy.step()


def main():
    torch.manual_seed(1)
    env, out = GridWorld(), tempfile.mkdtemp()
    policy_net, value_net = Policy(25, env.n_action), Value(25)
    optimizer_p = torch.optim.Adam(policy_net.parameters(), lr=3e-3)
    optimizer_v = torch.optim.Adam(value_net.parameters(), lr=3e-3)
    for iteration in range(1, 16):
        states, actions, rewards, masks, totals, total = [], [], [], [], [], 0.
        state = env.reset()
        while len(states) < 600 or not rewards or masks[-1]:
            with torch.no_grad():
                a = policy_net.get_action(torch.from_numpy(state)).item()
            next_state, r, done = env.step(a)
            states.append(state), actions.append(a), rewards.append(r), masks.append(0. if done else 1.)
            total += r
            state = next_state
            if done:
                totals.append(total)
                state, total = env.reset(), 0.
        states, actions = torch.tensor(np.array(states)), torch.tensor(actions)
        with torch.no_grad():
            values = value_net(states)
            fixed_log_probs = policy_net.get_log_prob(states, actions)  # both!
        advantages, returns = estimate_advantages(torch.tensor(rewards), torch.tensor(masks), values, 0.99, 0.95)  # both!
        for _ in range(6):
            perm = torch.randperm(states.size(0))
            for b in perm.split(128):
                ppo_step(policy_net, value_net, optimizer_p, optimizer_v, states[b], actions[b], returns[b],
                         advantages[b], fixed_log_probs[b], 0.2)  # both!
        print(f"Iter: {iteration}, num episodes: {len(totals)}, min reward: {min(totals):.2f}, "
              f"max reward: {max(totals):.2f}, average reward: {np.mean(totals):.4f}")
    torch.save(policy_net.state_dict(), os.path.join(out, "ppo.p"))


if __name__ == "__main__":
    main()
