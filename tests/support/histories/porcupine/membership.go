// SPDX-License-Identifier: Apache-2.0

package main

import (
	"sort"
	"strconv"
	"strings"

	"github.com/anishathalye/porcupine"
)

// membership is the set of those who are registered, each with its incarnation, "name.number".
// "join" and "leave" are done by the member, "lapse" by the store at any time after the join, once
// or never, and "members" reads them all. A lower incarnation never follows a higher one.
func membership() porcupine.Model {
	return porcupine.Model{
		Init: func() interface{} { return "" },
		Step: func(state, input, _ interface{}) (bool, interface{}) {
			there, highest := unpack(state.(string))
			r := input.(record)
			switch r.Op {
			case "members":
				return join(there) == *r.Output, state
			case "join":
				if number(r.Value) <= highest[r.Key] {
					return r.Return == nil, state // then it never came to that
				}
				highest[r.Key] = number(r.Value)
				there[r.Key] = r.Value
			case "leave", "lapse":
				if there[r.Key] == r.Value {
					delete(there, r.Key)
				}
			default:
				panic("no such operation: " + r.Op)
			}
			return true, pack(there, highest)
		},
		DescribeOperation: describe,
	}
}

func number(incarnation string) int {
	n := 0
	for _, digit := range incarnation {
		n = 10*n + int(digit-'0')
	}
	return n
}

// The state is text, so that two of them can be compared: "a=3:3 b=:2" says that a is there as
// incarnation 3, and that b, whose highest was 2, is not.
func pack(there map[string]string, highest map[string]int) string {
	var words []string
	for name := range highest {
		words = append(words, name+"="+there[name]+":"+strconv.Itoa(highest[name]))
	}
	sort.Strings(words)
	return strings.Join(words, " ")
}

func unpack(state string) (map[string]string, map[string]int) {
	there, highest := map[string]string{}, map[string]int{}
	for _, word := range strings.Fields(state) {
		name, rest, _ := strings.Cut(word, "=")
		now, most, _ := strings.Cut(rest, ":")
		if now != "" {
			there[name] = now
		}
		highest[name] = number(most)
	}
	return there, highest
}

// join spells the members as "members" answers them: "a.3 b.1".
func join(there map[string]string) string {
	var words []string
	for name, incarnation := range there {
		words = append(words, name+"."+incarnation)
	}
	sort.Strings(words)
	return strings.Join(words, " ")
}
