"""LightningModules with manual optimization as people write them, with data: nothing here knows of pipelines."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["MODULES", "REFUSED", "data"]

FEATURES, LATENT, CLASSES = 6, 4, 3


def data(part: int = 0, parts: int = 1, batch_size: int = 12, batches: int = 10) -> DataLoader:
    """Samples, noise and labels; with several parts, each batch is divided among them."""
    generator = torch.Generator().manual_seed(3)
    count = batch_size * batches
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    z = torch.randn(count, LATENT, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (count,), generator=generator)
    size = batch_size // parts
    rows = torch.arange(count).view(batches, parts, size)[:, part].reshape(-1)
    return DataLoader(TensorDataset(x[rows], z[rows], y[rows]), size)


def _layers(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Manual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization = False
        self.make()
        self.double()

    def make(self) -> None:
        raise NotImplementedError


class Gan(Manual):
    """The example of Lightning's documentation: the generated images are used by both losses."""

    def make(self) -> None:
        self.generator = _layers(LATENT, 16, 16, FEATURES)
        self.discriminator = _layers(FEATURES, 16, 16, 1)

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        x, z, _ = batch
        real_label = torch.ones((x.shape[0], 1), device=self.device, dtype=x.dtype)
        fake_label = torch.zeros((x.shape[0], 1), device=self.device, dtype=x.dtype)
        g_x = self.generator(z)
        d_x = self.discriminator(x)
        real_loss = F.binary_cross_entropy_with_logits(d_x, real_label)
        d_z = self.discriminator(g_x.detach())
        fake_loss = F.binary_cross_entropy_with_logits(d_z, fake_label)
        d_loss = real_loss + fake_loss
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        d_z = self.discriminator(g_x)
        g_loss = F.binary_cross_entropy_with_logits(d_z, real_label)
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        return {"loss": g_loss + d_loss}

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2)
        return g_opt, d_opt


def _trained(module):
    """The number of parameters that are trained at this moment of a step."""
    return float(sum(parameter.requires_grad for parameter in module.parameters()))


class ToggledGan(Gan):
    """The generator comes first and its images are kept, with toggled optimizers, clipping and schedulers."""

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        x, z, _ = batch
        valid = torch.ones(x.size(0), 1).type_as(x)
        self.toggle_optimizer(g_opt)
        images = self.generator(z)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(images), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.log("trained", _trained(self))
        self.manual_backward(g_loss)
        self.clip_gradients(g_opt, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        g_opt.step()
        g_opt.zero_grad()
        self.untoggle_optimizer(g_opt)
        self.toggle_optimizer(d_opt)
        real_loss = F.binary_cross_entropy_with_logits(self.discriminator(x), valid)
        fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(images.detach()), torch.zeros_like(valid))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        self.clip_gradients(d_opt, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        d_opt.step()
        d_opt.zero_grad()
        self.untoggle_optimizer(d_opt)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        with torch.no_grad():
            self.log("after", self.discriminator(self.generator(z)).mean())
        return g_loss

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
        return list(optimizers), schedulers


class NormGan(Gan):
    """BatchNorm in both networks: the statistics of the generator change once, though both losses need its images."""

    def make(self) -> None:
        super().make()
        self.generator.insert(2, nn.BatchNorm1d(16))
        self.discriminator.insert(2, nn.BatchNorm1d(16))


class NoisyGan(Gan):
    """Noise that the step draws, and dropout in the generator: both losses see the same images."""

    def make(self) -> None:
        super().make()
        self.generator.insert(2, nn.Dropout(0.5))

    def training_step(self, batch, batch_idx):
        x, z, y = batch
        return super().training_step((x, z + torch.randn_like(z), y), batch_idx)


class ActorCritic(Manual):
    """A shared body, two heads, two losses on one graph, two optimizers; the body is in the first of them."""

    def make(self) -> None:
        self.body = _layers(FEATURES, 16, 16)
        self.actor = _layers(16, 12, CLASSES)
        self.critic = _layers(16, 12, 1)

    def training_step(self, batch, batch_idx):
        actor_opt, critic_opt = self.optimizers()
        x, z, y = batch
        hidden = self.body(x)
        value = self.critic(hidden).squeeze(-1)
        returns = z.sum(1)
        advantage = (returns - value).detach()
        log_probability = F.log_softmax(self.actor(hidden), -1).gather(1, y.unsqueeze(1)).squeeze(1)
        actor_loss = -(log_probability * advantage).mean()
        critic_loss = F.mse_loss(value, returns)
        actor_opt.zero_grad()
        critic_opt.zero_grad()
        self.manual_backward(actor_loss, retain_graph=True)
        self.manual_backward(critic_loss)
        actor_opt.step()
        critic_opt.step()
        self.log("actor", actor_loss)
        self.log("critic", critic_loss)
        self.log("steps", float(self.global_step))
        return {"loss": actor_loss}

    def configure_optimizers(self):
        actor = torch.optim.SGD([*self.body.parameters(), *self.actor.parameters()], lr=0.05, momentum=0.9)
        return actor, torch.optim.Adam(self.critic.parameters(), lr=0.01)


class Adversary(Manual):
    """Training against a network that perturbs the inputs: it ascends the loss that the classifier descends."""

    def make(self) -> None:
        self.classifier = _layers(FEATURES, 16, 16, CLASSES)
        self.adversary = _layers(FEATURES, 8, FEATURES)

    def training_step(self, batch, batch_idx):
        opt, adversary_opt = self.optimizers()
        x, _, y = batch
        with adversary_opt.toggle_model():
            perturbed = x + 0.1 * torch.tanh(self.adversary(x))
            adversary_loss = -F.cross_entropy(self.classifier(perturbed), y)
            adversary_opt.zero_grad()
            self.manual_backward(adversary_loss)
            adversary_opt.step()
        with opt.toggle_model():
            perturbed = x + 0.1 * torch.tanh(self.adversary(x))
            loss = F.cross_entropy(self.classifier(x), y) + F.cross_entropy(self.classifier(perturbed.detach()), y)
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
        self.log("loss", loss)
        return {"loss": loss, "adversary": adversary_loss}

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.classifier.parameters(), lr=0.1),
            torch.optim.SGD(self.adversary.parameters(), lr=0.1),
        ]


class Accumulated(Manual):
    """One optimizer, a step every third batch."""

    every = 3

    def make(self) -> None:
        self.model = _layers(FEATURES, 16, 16, CLASSES)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, _, y = batch
        loss = F.cross_entropy(self.model(x), y) / self.every
        self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class OneSample(Manual):
    """Batches of one sample, and assertions on what is frozen, as in Lightning's own tests."""

    def make(self) -> None:
        self.first, self.second = _layers(FEATURES, 16, 16), _layers(16, 16, CLASSES)

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        for opt, mine, frozen in ((one, self.first, self.second), (other, self.second, self.first)):
            self.toggle_optimizer(opt)
            loss = self.second(self.first(batch)).square().mean()
            opt.zero_grad()
            self.manual_backward(loss)
            assert mine[0].weight.requires_grad is True
            assert frozen[0].weight.requires_grad is False
            opt.step()
            self.untoggle_optimizer(opt)
        return loss

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


MODULES: dict[str, Any] = {
    kind.__name__: kind for kind in (Gan, ToggledGan, NormGan, NoisyGan, ActorCritic, Adversary, Accumulated, OneSample)
}


# ---- refused, with words of the error


class _Step(Gan):
    """One backward of the discriminator's score, with something else around it."""

    def training_step(self, batch, batch_idx):
        x, z, _ = batch
        g_opt, d_opt = self.optimizers()
        fake = self.generator(z)
        self.step(g_opt, d_opt, x, fake, self.discriminator(fake))
        return {"loss": fake.mean()}


class InputGradient(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        (gradient,) = torch.autograd.grad(score.sum(), fake, create_graph=True)
        self.manual_backward(gradient.square().mean())


class ReadsGradient(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.manual_backward(score.mean())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Freezes(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.discriminator.requires_grad_(False)
        self.manual_backward(score.mean())


class OwnBackward(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        score.mean().backward()


class OldGradient(_Step):
    """The images of the old generator: torch refuses that, too, or takes gradients of old values."""

    def step(self, g_opt, d_opt, x, fake, score):
        self.manual_backward(score.mean(), retain_graph=True)
        g_opt.step()
        self.manual_backward(self.discriminator(fake).square().mean())


class ReadsRate(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.manual_backward(score.mean())
        g_opt.param_groups[0]["lr"] *= 0.9


class StaysToggled(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.toggle_optimizer(d_opt)
        self.manual_backward(self.discriminator(x).mean())


class HalfToggled(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.toggle_optimizer(g_opt)
        self.manual_backward(score.mean() + self.discriminator(x + fake).mean())
        self.untoggle_optimizer(g_opt)


class ClipsWeights(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.manual_backward(score.mean())
        for parameter in self.discriminator.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Closures(_Step):
    """LBFGS calls its closure several times."""

    def step(self, g_opt, d_opt, x, fake, score):
        d_opt.step(lambda: self.manual_backward(self.discriminator(x).square().mean()))

    def configure_optimizers(self):
        return super().configure_optimizers()[0], torch.optim.LBFGS(self.discriminator.parameters())


class NoBackward(_Step):
    def step(self, g_opt, d_opt, x, fake, score):
        self.log("score", score.mean())


REFUSED: dict[Any, str] = {
    InputGradient: "the step calls torch.autograd.grad. Use torch.func.grad",
    ReadsGradient: "the step reads or sets .grad",
    Freezes: "the step sets requires_grad of a parameter. Use self.toggle_optimizer",
    OwnBackward: "Use self.manual_backward(loss)",
    OldGradient: "step of optimizer 0 has changed its parameters since",
    ReadsRate: "reads param_groups of an optimizer",
    StaysToggled: "toggle_optimizer without untoggle_optimizer",
    HalfToggled: "from a call inside toggle_optimizer and from one outside of it",
    ClipsWeights: "the step changes the parameter discriminator.0.weight in place",
    Closures: "calls step(closure) of optimizer 1, which may run the closure several times",
    NoBackward: "runs no backward for the first batch",
}
