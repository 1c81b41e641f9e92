"""Soft actor-critic: a squashed Normal by ``rsample``, twin critics, a soft update of their targets."""

import copy

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.ReLU())
        self.mean, self.log_std = nn.Linear(32, 2), nn.Linear(32, 2)

    def forward(self, state):
        hidden = self.body(state)
        policy = Normal(self.mean(hidden), self.log_std(hidden).clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw)
        log_prob = policy.log_prob(raw) - torch.log(1 - action.square() + 1e-6)
        return action, log_prob.sum(-1)


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2))

    def forward(self, state, action):
        both = torch.cat([state, action], -1)
        return self.first(both).squeeze(-1), self.second(both).squeeze(-1)


def train(dispatch):
    actor, critics = Actor(), Critics()
    targets = copy.deepcopy(critics).requires_grad_(False)
    policy_step = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_step = torch.optim.Adam(critics.parameters(), lr=3e-4)
    state, action = torch.randn(32, 5), torch.rand(32, 2) * 2 - 1
    dispatch(actor, state, on_miss="compile")
    dispatch(critics, (state, action), on_miss="compile")
    dispatch(targets, (state, action), on_miss="compile")
    while True:
        state, action, reward = torch.randn(32, 5), torch.rand(32, 2) * 2 - 1, torch.randn(32)
        following = state + 0.1 * torch.randn_like(state)
        with torch.no_grad():
            next_action, next_log_prob = actor(following)
            wanted = reward + 0.99 * (torch.min(*targets(following, next_action)) - 0.2 * next_log_prob)
        one, other = critics(state, action)
        critic_loss = F.mse_loss(one, wanted) + F.mse_loss(other, wanted)
        critic_step.zero_grad()
        critic_loss.backward()
        critic_step.step()

        chosen, log_prob = actor(state)
        actor_loss = (0.2 * log_prob - torch.min(*critics(state, chosen))).mean()
        policy_step.zero_grad()
        actor_loss.backward()
        policy_step.step()
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                slow.mul_(0.995).add_(fast, alpha=0.005)
        yield critic_loss, actor_loss
