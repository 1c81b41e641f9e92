"""PPO: an actor-critic with a Categorical policy on a toy task, the clipped objective over epochs of minibatches."""

import torch
from torch import nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def policy(self, state):
        return Categorical(logits=self.actor(self.body(state)))

    def forward(self, state, action):
        hidden = self.body(state)
        policy = Categorical(logits=self.actor(hidden))
        return policy.log_prob(action), policy.entropy(), self.critic(hidden).squeeze(-1)


def train(dispatch):
    goal = torch.randn(6, 4)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    dispatch(model, (torch.randn(32, 6), torch.zeros(32, dtype=torch.long)))
    while True:
        with torch.no_grad():
            state = torch.randn(64, 6)
            policy = model.policy(state)
            action = policy.sample()
            old = policy.log_prob(action)
            reward = (state @ goal).gather(1, action[:, None]).squeeze(1)
            advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        for rows in torch.randperm(64).split(32):
            log_prob, entropy, value = model(state[rows], action[rows])
            ratio = (log_prob - old[rows]).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantage[rows]
            objective = torch.min(ratio * advantage[rows], clipped).mean()
            loss = -objective + 0.5 * (reward[rows] - value).square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        yield loss, reward.mean()
