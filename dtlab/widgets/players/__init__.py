"""The players' ECMAScript and style sheet: `player.js` for all, and a drawing for each."""
