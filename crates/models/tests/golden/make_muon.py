"""Generates updates of small matrices by `torch.optim.Muon`, and of the remaining parameters by `torch.optim.AdamW`.

    python make_muon.py

Writes muon.safetensors beside itself. Every case starts with the same weights and takes the same four gradients, some of which are
small enough for the least norm to matter. Two cases use PyTorch's own Newton-Schulz, which rounds to bf16; in the others PyTorch
runs everything except that function, which is implemented here in f64.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim import _muon

STEPS = 4
MATRICES = {
    "layers.0.square": (12, 12),
    "layers.0.wide": (6, 20),
    "layers.0.tall": (22, 8),
    "layers.1.square": (12, 12),
    "layers.1.wide": (6, 20),
    "layers.1.tall": (22, 8),
    "layers.2.odd": (5, 17),
}
OTHERS = {"embed": (10, 6), "layers.0.norm": (12,)}
# For each case: whether Newton-Schulz is computed exactly, the adjustment of the rate, and whether momentum is
# Nesterov's.
CASES = {
    "bf16.original": (False, "original", True),
    "bf16.match_rms_adamw": (False, "match_rms_adamw", True),
    "f32.original": (True, "original", False),
    "f32.match_rms_adamw": (True, "match_rms_adamw", True),
}
LR = {"original": 0.02, "match_rms_adamw": 5e-3}
ADAMW_LR = 3e-3


def exact(matrix, coefficients, steps, eps):
    """The polynomial applied to singular values, in f64: X = U S V^T becomes U p(p(...S)) V^T."""
    a, b, c = coefficients
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / max(torch.linalg.norm(values), eps)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return (left @ torch.diag(values) @ right).to(matrix.dtype)


def trained(weights, gradients, is_exact, adjust, nesterov):
    """The weights after the first and the last step."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    lr = LR[adjust]
    muon = torch.optim.Muon(
        [parameters[name] for name in MATRICES], lr=lr, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust
    )
    decays = [{"params": [parameters["embed"]], "weight_decay": 0.1}]
    decays += [{"params": [parameters["layers.0.norm"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decays, lr=ADAMW_LR, betas=(0.9, 0.95), eps=1e-8)
    usual = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = exact if is_exact else usual
    after = {}
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = gradients[step][name].clone()
        muon.step()
        adamw.step()
        if step in (0, STEPS - 1):
            after |= {f"after.{step + 1}.{name}": p.detach().clone() for name, p in parameters.items()}
    _muon._zeropower_via_newtonschulz = usual
    return after


def main():
    torch.manual_seed(7)
    shapes = MATRICES | OTHERS
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    sizes = [1.0, 1e-3, 0.2, 3.0]
    gradients = [{name: size * torch.randn(shape) for name, shape in shapes.items()} for size in sizes]
    # A matrix whose first gradient is zero only decays.
    gradients[0]["layers.1.wide"].zero_()
    tensors = {f"weight.{name}": value for name, value in weights.items()}
    for step, of_step in enumerate(gradients):
        tensors |= {f"gradient.{step + 1}.{name}": value for name, value in of_step.items()}
    for case, options in CASES.items():
        tensors |= {f"{case}.{name}": value for name, value in trained(weights, gradients, *options).items()}
    save_file(tensors, Path(__file__).with_name("muon.safetensors"), {"torch": torch.__version__})


if __name__ == "__main__":
    main()
