# SPDX-License-Identifier: Apache-2.0
"""Text ⇄ token ids: `template` makes a prompt of items, `tokenizer` ids of text, `detokenizer` text of ids."""
