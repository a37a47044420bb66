"""A program of a public report.

fault: the target mixing network loads its own state, so it is never updated
link: https://github.com/thesouther/MARL/issues/8
says: (?i)target|load_state_dict|own (state|weights)|itself|never (updat|chang|chang)|(stays?|same|initial).{0,40}(weights|values|parameters)
kind: correctness
"""
"""Two agents learn together: their values are mixed into one, with a replay buffer and target networks."""
import random

import torch
from torch import nn


class AgentNet(nn.Module):
    def __init__(self, inputs, actions, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, actions))

    def forward(self, observation):
        return self.net(observation)


class QMixNet(nn.Module):
    def __init__(self, agents, state, hidden=24):
        super().__init__()
        self.agents, self.hidden = agents, hidden
        self.w1, self.b1 = nn.Linear(state, agents * hidden), nn.Linear(state, hidden)
        self.w2, self.b2 = nn.Linear(state, hidden), nn.Sequential(nn.Linear(state, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, q, state):
        w1 = self.w1(state).abs().view(-1, self.agents, self.hidden)
        mixed = nn.functional.elu(torch.bmm(q[:, None], w1)[:, 0] + self.b1(state))
        return (mixed * self.w2(state).abs()).sum(1) + self.b2(state)[:, 0]


class Meeting:
    """Both agents walk on a ring and are paid when they stand on the lit place together."""

    def __init__(self, places=8):
        self.places = places

    def reset(self):
        self.at = [random.randrange(self.places) for _ in range(2)]
        self.lit, self.clock = random.randrange(self.places), 0
        return self.observe()

    def observe(self):
        code = torch.zeros(3, self.places)
        for row, place in enumerate((*self.at, self.lit)):
            code[row, place] = 1
        return torch.stack((code[[0, 2]].flatten(), code[[1, 2]].flatten())), code.flatten()

    def step(self, actions):
        self.at = [(place + action - 1) % self.places for place, action in zip(self.at, actions)]
        self.clock += 1
        paid = self.at[0] == self.lit and self.at[1] == self.lit
        return self.observe(), 10.0 * paid - 0.1, paid or self.clock >= 15


class Policy:
    def __init__(self, inputs, state, actions, gamma=0.95, target_update_cycle=50):
        self.eval_rnn, self.target_rnn = AgentNet(inputs, actions), AgentNet(inputs, actions)
        self.eval_qmix_net, self.target_qmix_net = QMixNet(2, state), QMixNet(2, state)
        self.target_rnn.load_state_dict(self.eval_rnn.state_dict())
        self.target_qmix_net.load_state_dict(self.eval_qmix_net.state_dict())
        self.parameters = list(self.eval_qmix_net.parameters()) + list(self.eval_rnn.parameters())
        self.optimizer = torch.optim.RMSprop(self.parameters, lr=1e-3)
        self.gamma, self.target_update_cycle = gamma, target_update_cycle

    @torch.no_grad()
    def choose(self, observation, epsilon):
        greedy = self.eval_rnn(observation).argmax(1).tolist()
        return [random.randrange(3) if random.random() < epsilon else action for action in greedy]

    def learn(self, batch, train_step):
        obs, state, actions, rewards, next_obs, next_state, done = batch
        q_evals = self.eval_rnn(obs).gather(2, actions[..., None])[..., 0]
        q_total = self.eval_qmix_net(q_evals, state)
        with torch.no_grad():
            q_targets = self.target_rnn(next_obs).max(2).values
            targets = rewards + self.gamma * self.target_qmix_net(q_targets, next_state) * (1 - done)
        loss = (q_total - targets).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 10)
        self.optimizer.step()
        if train_step > 0 and train_step % self.target_update_cycle == 0:
            self.target_rnn.load_state_dict(self.eval_rnn.state_dict())
            self.target_qmix_net.load_state_dict(self.target_qmix_net.state_dict())  # ill!
            self.target_qmix_net.load_state_dict(self.eval_qmix_net.state_dict())  # well
        return loss.item()


def run_episode(env, policy, epsilon, buffer=None):
    (obs, state), done, total = env.reset(), False, 0.0
    while not done:
        actions = policy.choose(obs, epsilon)
        (next_obs, next_state), reward, done = env.step(actions)
        if buffer is not None:
            buffer.append((obs, state, torch.tensor(actions), torch.tensor(reward), next_obs, next_state, torch.tensor(float(done))))
        obs, state, total = next_obs, next_state, total + reward
    return total


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    env, policy, buffer = Meeting(), Policy(16, 24, 3), []
    train_step = 0
    for epoch in range(100_000):
        for _ in range(8):
            run_episode(env, policy, max(0.05, 1 - epoch / 60), buffer)
        del buffer[:-5000]
        losses = []
        for _ in range(10):
            losses.append(policy.learn([torch.stack(part) for part in zip(*random.sample(buffer, 64))], train_step))
            train_step += 1
        if epoch % 10 == 0:
            reward = sum(run_episode(env, policy, 0.0) for _ in range(20)) / 20
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.3f} evaluation {reward:.2f}", flush=True)
