"""The linear reward model against scikit-learn and closed forms, and its features of texts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from rm_optimizer import PreferencePair
from rm_optimizer.data_efficiency.margin_analysis import fit_linear_reward, text_differences
from rm_optimizer.errors import DataError


@pytest.mark.parametrize("num", [3, 40, 400])
def test_the_fit_is_that_of_scikit_learn(num):
    generator = np.random.default_rng(num)
    z = generator.normal(size=(num, 6)) * 4
    y = (generator.random(num) < expit(z[:, 0])).astype(float)
    y[:2] = 0, 1
    weights = fit_linear_reward(z, y, ridge=0.5)
    peer = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=2000).fit(z, y)
    np.testing.assert_allclose(weights, peer.coef_[0], rtol=1e-4, atol=1e-6)


def test_text_features_tell_words_lengths_and_questions_apart():
    pairs = [
        PreferencePair("q", f"red apple pie number {n % 3}", f"blue sky today? number {n % 3}{' and' * (n % 4)}")
        for n in range(30)
    ]
    differences = text_differences(pairs, num_directions=4)
    assert differences.shape == (30, 6)
    exchanged = text_differences([PreferencePair("q", pair.rejected, pair.chosen) for pair in pairs], num_directions=4)
    np.testing.assert_allclose(np.abs(exchanged), np.abs(differences), atol=1e-6)
    with pytest.raises(DataError, match="give more pairs"):
        text_differences([PreferencePair("q", "one", "two")])
