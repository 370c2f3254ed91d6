"""Hanabi of TextArena with two suits, eight cards and a short text: see README.md."""

from textarena.envs.Hanabi.env import Card, HanabiEnv, Suit


SUITS, RANKS = (Suit.WHITE, Suit.RED), (1, 1, 2, 3)


class ShortHanabi(HanabiEnv):
    """Each player holds two cards, which only the other one sees. The first wrong card ends the game."""

    def __init__(self):
        super().__init__(info_tokens=4, fuse_tokens=0)

    def generate_hand(self, deck):
        return [self._draw_card(deck) for _ in range(2)]

    def _generate_deck(self):
        return [Card(suit, rank) for suit in SUITS for rank in RANKS]

    def _initial_prompt(self, player_id, game_state):
        return (
            "Hanabi. Build white and red from 1 to 3 together. Moves: [Play] X, [Discard] X, "
            "[Reveal] player N card X rank R."
        )

    def _state_description(self):
        state, other = self.state.game_state, 1 - self.state.current_player_id
        hand = ", ".join(f"card {k} {x.suit.value} {x.rank}" for k, x in enumerate(state["player_hands"][other]) if x)
        built = ", ".join(f"{suit.value} {state['fireworks'][suit]}" for suit in SUITS)
        return f"Built: {built}. Hints left: {state['info_tokens']}. Player {other} has: {hand}. Your move:"
